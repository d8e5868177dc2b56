"""A batch job: many calls at one time, each tried again when it is refused.

    batch.py URL WORKERS MILLISECONDS

Each worker makes one call after another; the provider takes MILLISECONDS for
one, give or take a fifth. {} is printed when every worker has had an answer or
an error. From a line of input to the end of it what happens is counted, then
the calls that are being made are finished and the counts printed.
"""

import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

# An ordinary client's wait after a refusal: doubled each time, and half of it
# random so that the workers spread out.
FIRST_WAIT, LAST_WAIT = 0.1, 1.0
GOLDEN = (1 + 5 ** 0.5) / 2

lock = threading.Lock()
stop = threading.Event()
measuring = False
jobs = 0
report = {"done": 0, "refused": 0, "failed": 0, "error": "", "latencies": []}


def count(error):
    with lock:
        if not measuring:
            return
        if error is None:
            report["done"] += 1
        elif isinstance(getattr(error, "reason", error), (ConnectionRefusedError, PermissionError)):
            report["refused"] += 1
        else:
            report["failed"] += 1
            report["error"] = report["error"] or str(error)


def job(url, mean, begun):
    """One call, until it is answered."""
    global jobs
    with lock:
        counts, work = measuring, mean * (0.8 + 0.4 * (jobs / GOLDEN % 1))
        jobs += 1
    begin, wait = time.monotonic_ns(), FIRST_WAIT
    while True:
        try:
            with urlopen("%s/?work=%.3fms" % (url, work), timeout=30) as answer:
                answer.read()
            error = None
        except OSError as e:
            error = e
        count(error)
        begun.set()
        if error is None:
            break
        time.sleep(wait / 2 + random.random() * wait / 2)
        wait = min(2 * wait, LAST_WAIT)
        if error is not None and stop.is_set():
            return  # gives up: it would be no answer to anybody
    if counts:
        with lock:
            report["latencies"].append(time.monotonic_ns() - begin)


def worker(url, mean, begun):
    while not stop.is_set():
        job(url, mean, begun)


def main():
    global measuring
    url, workers, mean = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    with ThreadPoolExecutor(workers) as pool:
        begun = [threading.Event() for _ in range(workers)]
        running = [pool.submit(worker, url, mean, b) for b in begun]
        for b in begun:
            b.wait()
        print("{}", flush=True)
        since = time.monotonic()
        for _ in sys.stdin:
            with lock:
                measuring = True
            since = time.monotonic()
        with lock:
            measuring = False
        report["seconds"] = time.monotonic() - since
        stop.set()
    for r in running:
        r.result()
    report["latencies"].sort()
    print(json.dumps(report), flush=True)


main()
