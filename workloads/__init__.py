"""What is asked, and when: the same for an engine here and a server elsewhere.

To read: streams, options (how a flag's word is read), lengths, arrivals, datasets (random tokens), text, jsonl, support,
sharegpt, traces, load, facts (a workload in numbers), grid.
"""
