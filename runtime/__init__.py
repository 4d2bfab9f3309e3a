"""The runtime: records regions, cuts, lowers, compiles and runs them, and answers reads.

Knows no op by name; what it needs from above (lowerings, shape inference, settings) is handed in at start.
"""

if __name__ != "torchtpu.runtime":
    raise ImportError(f"import this package as torchtpu.runtime, not as {__name__}: its state must exist once")
