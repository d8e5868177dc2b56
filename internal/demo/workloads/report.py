"""A report: many database sessions at one time, each tried again until it gets one.

    report.py PSQL WHERE SESSIONS SECONDS

Prints {} when every session has begun or was turned away, and at the end of
its input how many were and how often.
"""

import json
import random
import subprocess
import sys
import threading
import time

psql, where, sessions, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
lock = threading.Lock()
tried = [threading.Event() for _ in range(sessions)]
counts = {"done": 0, "refused": 0, "failed": 0, "error": ""}


def session(i):
    wait = 0.5
    while True:
        # What a session prints first says that it has one.
        p = subprocess.Popen([psql, "-X", "-q", "-A", "-t", "-d", where, "-c", "select 'begun'", "-c", "select pg_sleep(%s)" % seconds],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        begun = p.stdout.readline() != b""
        with lock:
            if begun:
                counts["done"] += 1
        tried[i].set()
        error = p.communicate()[1].decode().strip()
        if not begun:
            with lock:
                if "Connection refused" in error:
                    counts["refused"] += 1
                else:
                    counts["failed"] += 1
                    counts["error"] = counts["error"] or error
        time.sleep(wait / 2 + random.random() * wait / 2)
        wait = min(2 * wait, 2)


for i in range(sessions):
    threading.Thread(target=session, args=(i,), daemon=True).start()
for t in tried:
    t.wait()
print("{}", flush=True)
sys.stdin.read()
with lock:
    print(json.dumps(counts), flush=True)
