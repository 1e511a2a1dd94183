#!/bin/bash
set -euo pipefail
python3 - <<'PY'
import csv
import os
import sqlite3

database = sqlite3.connect(f"file:{os.environ['STOCK_DB']}?mode=ro", uri=True)
rows = database.execute(
    """
    select sku, stock, minimum - stock as missing
    from (
        select items.sku, minimum, coalesce(sum(quantity), 0) as stock
        from items left join movements on movements.sku = items.sku and not cancelled
        where not discontinued
        group by items.sku
    )
    where stock < minimum
    order by missing desc, sku
    """
).fetchall()
with open("report.csv", "w", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["sku", "stock", "missing"])
    writer.writerows(rows)
PY
