#!/bin/bash
set -euo pipefail
cd /workspace
cat > report.sh <<'SCRIPT'
#!/usr/bin/env python3
import glob
import json
import os
import sys

directory = sys.argv[1]
services = {}
with open(os.path.join(directory, "services.csv")) as file:
    next(file)
    for line in file:
        service, name, team = line.strip().split(",")
        services[service] = name, team

fields = {"id": str, "service": str, "status": int, "ms": int}
malformed = unknown = 0
seen = set()
requests = {}
for path in sorted(glob.glob(os.path.join(glob.escape(directory), "requests-*.jsonl"))):
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line:
                continue
            try:
                record = json.loads(line)
                good = all(type(record[key]) is kind for key, kind in fields.items())
            except (ValueError, KeyError, TypeError):
                good = False
            if not good:
                malformed += 1
                continue
            if record["id"] in seen:
                continue
            seen.add(record["id"])
            if record["service"] not in services:
                unknown += 1
                continue
            requests.setdefault(record["service"], []).append((record["ms"], record["status"]))

rows = []
for service, records in requests.items():
    name, team = services[service]
    times = sorted(ms for ms, _ in records)
    errors = sum(status >= 500 for _, status in records)
    permille = 1000 * errors // len(records)
    rank = (95 * len(times) + 99) // 100
    rows.append((-permille, name.encode(), [name, team, len(records), errors, permille, times[rank - 1]]))

print("name,team,requests,errors,permille,p95_ms")
for _, _, row in sorted(rows):
    print(*row, sep=",")
print(f"malformed,{malformed}")
print(f"unknown,{unknown}")
SCRIPT
chmod +x report.sh
./report.sh data > report.csv
