"""Parses one JSON document after another and does nothing else."""

import json

document = json.dumps([{"id": i, "name": "n%d" % i, "v": [1, 2, 3]} for i in range(2000)])
print("{}", flush=True)
while True:
    json.loads(document)
