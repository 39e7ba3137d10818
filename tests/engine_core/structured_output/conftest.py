"""Tests here need llguidance and jsonschema."""

import importlib.util

needed = ("llguidance", "jsonschema")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, needed)) else ["test_*.py"]
