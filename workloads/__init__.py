"""What is asked, and when: the same for an engine here and a server elsewhere.

To read: streams, lengths, arrivals, datasets (random tokens), text, jsonl, support, load, grid.
"""
