"""Python runs this as it starts in a test's process."""

from __future__ import annotations

import hooks

hooks.install()
