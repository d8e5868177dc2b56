// A web application: answers each request by calling something else.
//
//     app.js PORT NAME=http://HOST:PORT...
//
// GET /NAME?QUERY is answered with what GET http://HOST:PORT/?QUERY answers, a
// refused call with 503 and what failed in another way with 502. As app.py
// with a thread for each request, for node.
'use strict';
const http = require('http');

const [port, ...rest] = process.argv.slice(2);
const dependencies = new Map(rest.map((arg) => {
  const at = arg.indexOf('=');
  return [arg.slice(0, at), arg.slice(at + 1)];
}));

function answer(response, status, body) {
  response.writeHead(status, {'Content-Length': Buffer.byteLength(body)});
  response.end(body);
}

function failed(response, error) {
  answer(response, error.code === 'ECONNREFUSED' || error.code === 'EPERM' ? 503 : 502, String(error.message || error.code));
}

http.createServer((request, response) => {
  const [, name, query] = request.url.match(/^\/([^?]*)\??(.*)$/);
  http.get(`${dependencies.get(name)}/?${query}`, {timeout: 30000}, (reply) => {
    const parts = [];
    reply.on('error', (error) => failed(response, error));
    reply.on('data', (part) => parts.push(part));
    reply.on('end', () => {
      if (reply.statusCode !== 200) {
        failed(response, new Error(`HTTP status ${reply.statusCode}`));
      } else {
        answer(response, 200, Buffer.concat(parts));
      }
    });
  }).on('error', (error) => failed(response, error))
    .on('timeout', function () { this.destroy(new Error('timed out')); });
}).listen(Number(port), '127.0.0.1', () => console.log('{}'));
