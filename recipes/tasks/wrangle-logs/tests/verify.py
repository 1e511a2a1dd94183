"""Runs report.sh on hidden directories and compares with a reference; a quarter is for report.csv."""

import json
import os
import random
import shutil
import sys
import tempfile

sys.path.insert(0, "/tests")
from harness import finish, run, take_over

NAMES = "checkout search login cart mail images feed export audit Billing zeta geo".split()
TEAMS = ["payments", "discovery", "identity", "platform"]
TYPES = {"id": str, "service": str, "status": int, "ms": int}


def report(directory):
    with open(os.path.join(directory, "services.csv"), newline="") as file:
        rows = [line.rstrip("\r\n").split(",") for line in file][1:]
    services = {row[0]: (row[1], row[2]) for row in rows}
    malformed = unknown = 0
    seen, requests = set(), {}
    for name in sorted(os.listdir(directory)):
        if not (name.startswith("requests-") and name.endswith(".jsonl")):
            continue
        with open(os.path.join(directory, name)) as file:
            lines = file.read().split("\n")
        for line in lines:
            if line == "":
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or any(
                type(record.get(key)) is not kind for key, kind in TYPES.items()
            ):
                malformed += 1
            elif record["id"] not in seen:
                seen.add(record["id"])
                if record["service"] in services:
                    requests.setdefault(record["service"], []).append(record)
                else:
                    unknown += 1
    rows = []
    for service, records in requests.items():
        name, team = services[service]
        errors = sum(record["status"] >= 500 for record in records)
        times = sorted(record["ms"] for record in records)
        p95 = times[-(-95 * len(times) // 100) - 1]
        permille = 1000 * errors // len(records)
        rows.append((-permille, name, f"{name},{team},{len(records)},{errors},{permille},{p95}"))
    lines = ["name,team,requests,errors,permille,p95_ms"]
    lines += [row[2] for row in sorted(rows)]
    return "\n".join([*lines, f"malformed,{malformed}", f"unknown,{unknown}", ""])


def write_logs(directory, rng, requests, flaws):
    """A directory of logs. `flaws` is a subset of malformed, retried, unknown, crlf."""
    names = rng.sample(NAMES, rng.randint(2, len(NAMES)))
    services = [(f"s{i + 1}", name, rng.choice(TEAMS)) for i, name in enumerate(names)]
    end = "\r\n" if "crlf" in flaws else "\n"
    with open(os.path.join(directory, "services.csv"), "w", newline="") as file:
        file.write("id,name,team" + end)
        file.writelines(",".join(service) + end for service in services)
    # The last service stays without a request.
    known = [service[0] for service in services][:-1]
    error_rate = {service: rng.choice([0, 0, 0.01, 0.2, 0.5]) for service in known}
    lines = []
    for number in range(requests):
        service = rng.choice(known)
        failed = rng.random() < error_rate[service]
        record = {
            "id": f"r{number}",
            "ts": f"2026-03-01T{rng.randint(0, 5):02d}:{rng.randint(0, 59):02d}:00Z",
            "service": service,
            "status": rng.choice([500, 502, 599] if failed else [200, 200, 204, 404, 499]),
            "ms": int(rng.lognormvariate(4, 1)),
        }
        if "unknown" in flaws and rng.random() < 0.03:
            record["service"] = rng.choice(["s99", "S1", ""])
        keys = list(record)
        rng.shuffle(keys)
        lines.append(json.dumps({key: record[key] for key in keys}, separators=rng.choice([None, (",", ":")])))
    if "retried" in flaws:
        # A retry differs from the first: only the first counts.
        for line in rng.sample(lines, len(lines) // 12):
            record = json.loads(line)
            record["ms"] += rng.randint(0, 500)
            record["status"] = rng.choice([200, 503])
            lines.insert(rng.randint(0, len(lines)), json.dumps(record))
    if "malformed" in flaws:
        intact = list(lines)
        for _ in range(max(3, len(lines) // 25)):
            record = json.loads(rng.choice(intact))
            record["id"] = f"m{rng.random()}"
            broken = rng.choice(["cut", "missing", "type", "list", "text", "null"])
            if broken == "missing":
                del record[rng.choice(list(TYPES))]
            elif broken == "type":
                key = rng.choice(["status", "ms"])
                record[key] = rng.choice([str(record[key]), None, record[key] + 0.5])
            elif broken == "null":
                record["service"] = None
            text = json.dumps(record)
            text = {"cut": text[: len(text) // 2], "list": f"[{text}]", "text": "-- rotated --"}.get(broken, text)
            lines.insert(rng.randint(0, len(lines)), text)
        lines.insert(rng.randint(0, len(lines)), "")
    parts = rng.randint(1, 3)
    for part in range(parts):
        with open(os.path.join(directory, f"requests-{part:02d}.jsonl"), "w") as file:
            file.writelines(line + "\n" for line in lines[part::parts])


def main():
    rng = random.Random()
    with open("/tests/data.json") as file:
        given = json.load(file)
    take_over()
    hidden = {
        "clean": [],
        "malformed": ["malformed"],
        "retried": ["retried"],
        "unknown": ["unknown", "crlf"],
        "all": ["malformed", "retried", "unknown", "crlf"],
    }
    scores = {}
    for name, flaws in hidden.items():
        passed = True
        for requests in (1, 20, 40, 700):
            directory = tempfile.mkdtemp()
            write_logs(directory, rng, requests, flaws)
            expected = report(directory)
            code, out = run(["/workspace/report.sh", directory], timeout=20)
            passed = passed and code == 0 and out == expected
            shutil.rmtree(directory, ignore_errors=True)
            if not passed:
                break
        scores[name] = int(passed)
    # The report on the data as the task gave it: the agent may have changed its copy.
    directory = tempfile.mkdtemp()
    for name, text in given.items():
        with open(os.path.join(directory, name), "w", newline="") as file:
            file.write(text)
    try:
        with open("/workspace/report.csv", newline="") as file:
            scores["report"] = int(file.read(1 << 20) == report(directory))
    except (OSError, ValueError):
        scores["report"] = 0
    share = sum(scores[name] for name in hidden) / len(hidden)
    finish(reward=0.25 * scores["report"] + 0.75 * share, **scores)


if __name__ == "__main__":
    main()
