"""Where the supported versions of jaxlib differ."""

from __future__ import annotations

import jaxlib

_VERSION = jaxlib.version.__version_info__

# 0.10 checks what a result handler is given unless it is told not to; later versions never do.
UNCHECKED_HANDLER = {"_skip_checks": True} if _VERSION < (0, 11) else {}
# From 0.11 on, XLA's emitters of fusions cannot be turned off on platform cpu.
HAS_FUSION_EMITTERS_OPTION = _VERSION < (0, 11)
# 0.10 reduces bfloat16 wrongly: see `miscompiled`.
REDUCES_BFLOAT16_WRONGLY = _VERSION < (0, 11)
