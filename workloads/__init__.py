"""What is asked, and when: the same for an engine here and a server elsewhere.

To read: streams, options (a flag's words), lengths, arrivals, datasets (random tokens), text, jsonl, support, sharegpt,
traces, load, facts (a workload in numbers), grid.
"""
