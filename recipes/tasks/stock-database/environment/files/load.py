"""Makes the database of two CSV files."""

import csv
import sqlite3
import sys

items, movements, target = sys.argv[1:]
database = sqlite3.connect(target)
database.execute("create table items (sku text primary key, minimum integer not null, discontinued integer not null)")
database.execute(
    "create table movements (id integer primary key, sku text not null, quantity integer not null, cancelled integer not null)"
)
for path, statement in ((items, "insert into items values (?, ?, ?)"), (movements, "insert into movements values (?, ?, ?, ?)")):
    with open(path, newline="") as file:
        rows = list(csv.reader(file))[1:]
    database.executemany(statement, rows)
database.commit()
