"""Compares report.csv with the lines that are right. Nothing of the agent's is run."""

import json
import os

with open("/tests/expected.json") as file:
    expected = json.load(file)
lines = []
if os.path.isfile("report.csv") and os.path.getsize("report.csv") < 1 << 16:
    with open("report.csv", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
rows = lines[1:]
scores = {
    "header": float(lines[:1] == ["sku,stock,missing"]),
    "rows": float(sorted(rows) == sorted(expected)),
    "order": float(rows == expected),
}
scores["reward"] = float(all(scores.values()))
print(json.dumps(scores))
with open("/logs/verifier/reward.json", "w") as file:
    json.dump(scores, file)
