#!/bin/bash
set -euo pipefail
cd /workspace
python3 - <<'PY'
import pathlib

def edit(path, old, new):
    file = pathlib.Path(path)
    text = file.read_text()
    assert text.count(old) == 1, path
    file.write_text(text.replace(old, new))

edit(
    "slotbook/times.py",
    '    if match[3].lower() == "pm" and hour != 12:\n        hour += 12\n',
    '    hour %= 12\n    if match[3].lower() == "pm":\n        hour += 12\n',
)
edit(
    "slotbook/schedule.py",
    "(blocks[-1][0], end)",
    "(blocks[-1][0], max(blocks[-1][1], end))",
)
PY
python3 -m unittest discover -s tests
