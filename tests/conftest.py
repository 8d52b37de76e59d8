"""Its place puts this folder on the path, for the helpers that tests/hub imports too."""

from __future__ import annotations

import os

from hypothesis import settings

# In CI the same examples every time, so that a red run is about the change; elsewhere new ones each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
