"""What the device did and why: in comes a block of code or a whole command, out comes a report.

with torchtpu.explain() as e: ...     # then print(e), e.json(), e.html()
torchtpu explain -- python train.py
"""

from __future__ import annotations

from torchtpu.diagnostics.session import Explanation, explain

__all__ = ["Explanation", "explain"]
