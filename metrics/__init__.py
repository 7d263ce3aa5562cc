"""What was observed (records), kept (store) and concluded (summary, stats): the ground floor, no other folder known.

To read: records, window, latency, slo, memory, summary, stats, parquet, store.
"""
