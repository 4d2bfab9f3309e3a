"""The runtime: records regions, cuts, lowers, compiles and runs them, and answers reads.

Knows no op by name; what it needs from above (lowerings, shape inference, settings) is handed in at start.
"""

import os

import torch

if __name__ != "torchtpu.runtime":
    raise ImportError(f"import this package as torchtpu.runtime, not as {__name__}: its state must exist once")

# A build from source has one extension, here; a wheel has one for each torch, in folders of their own.
__path__.append(os.path.join(__path__[0], "torch" + "_".join(torch.__version__.split(".")[:2])))
