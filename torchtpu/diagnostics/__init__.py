"""Reports what the device did in a block of code or a whole command, and why.

with torchtpu.explain() as e: ...     # then print(e), e.json(), e.html()
torchtpu explain -- python train.py
"""
