"""A web application: answers each request by calling something else.

    app.py PORT THREADS [--retry] NAME=WHAT...

GET /NAME?QUERY is answered with what WHAT answers:

    http://HOST:PORT    GET WHAT/?QUERY
    PSQL postgresql:... a session of psql with one statement
    parse:N             a document of N records, parsed

THREADS requests are answered at one time and the others wait; 0 is a thread for
each. With --retry a refused call is tried again after a wait, else it is
answered with 503, and what failed in another way with 502.
"""

import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

FIRST_WAIT, LAST_WAIT, PATIENCE = 0.025, 0.4, 30


def http(base):
    def call(query):
        connection = HTTPConnection(base.removeprefix("http://"), timeout=PATIENCE)
        try:
            connection.request("GET", "/?" + query)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError("%s answered %d" % (base, answer.status))
        return body
    return call


def database(psql, where):
    def call(query):
        done = subprocess.run([psql, "-X", "-q", "-A", "-t", "-d", where, "-c", "select 1"], capture_output=True)
        if done.returncode == 0:
            return done.stdout
        error = done.stderr.decode().strip()
        raise ConnectionRefusedError(error) if "Connection refused" in error else OSError(error)
    return call


def parser(records):
    document = json.dumps([{"id": i, "name": "n%d" % i, "v": [1, 2, 3]} for i in range(records)])

    def call(query):
        return b"%d" % len(json.loads(document))
    return call


def dependency(what):
    if what.startswith("http:"):
        return http(what)
    if what.startswith("parse:"):
        return parser(int(what.removeprefix("parse:")))
    return database(*what.split(" ", 1))


def refused(error):
    return isinstance(getattr(error, "reason", error), (ConnectionRefusedError, PermissionError))


def patient(call):
    def again(query):
        wait, begin = FIRST_WAIT, time.monotonic()
        while True:
            try:
                return call(query)
            except OSError as error:
                if not refused(error) or time.monotonic() - begin > PATIENCE:
                    raise
            time.sleep(wait / 2 + random.random() * wait / 2)
            wait = min(2 * wait, LAST_WAIT)
    return again


class Handler(BaseHTTPRequestHandler):
    dependencies = {}
    wbufsize = -1  # the whole answer in one write

    def do_GET(self):
        name, _, query = self.path.removeprefix("/").partition("?")
        try:
            status, body = 200, self.dependencies[name](query)
        except (OSError, HTTPException) as error:
            status, body = (503 if refused(error) else 502), str(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Pooled(HTTPServer):
    threads = 1

    def server_activate(self):
        self.pool = ThreadPoolExecutor(self.threads)
        super().server_activate()

    def process_request(self, request, address):
        self.pool.submit(self.answer, request, address)

    def answer(self, request, address):
        try:
            self.finish_request(request, address)
        except ConnectionError:
            pass  # the caller has gone
        finally:
            self.shutdown_request(request)


def main():
    port, threads, *rest = sys.argv[1:]
    retry = "--retry" in rest
    for name, _, what in (arg.partition("=") for arg in rest if arg != "--retry"):
        call = dependency(what)
        Handler.dependencies[name] = patient(call) if retry else call
    server = ThreadingHTTPServer if threads == "0" else Pooled
    server.request_queue_size = 128
    Pooled.threads = int(threads)
    with server(("127.0.0.1", int(port)), Handler) as listening:
        print("{}", flush=True)
        listening.serve_forever()


main()
