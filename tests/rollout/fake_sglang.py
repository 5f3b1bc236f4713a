"""A server with SGLang's routes and no model: answers are a function of prompt and seed, faults come on demand.

As a program (``python fake_sglang.py --port=N ...``) it stands in for ``sglang.launch_server``; imports nothing but the
standard library, so that it starts at once.
"""

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STOP, VOCAB = 2, 48


class Fake(ThreadingHTTPServer):
    """Args: version and model_type: what it claims to be. key: wanted from clients. refusals: of /flush_cache.

    faults: taken by one /generate each, oldest first; "" is none. calls: (route, body) in order.
    """

    daemon_threads, request_queue_size = True, 128

    def __init__(self, port=0, *, version="0.5.23", model_type="llama", vocab=VOCAB, key="", longest=512, refusals=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.version, self.model_type, self.vocab, self.key = version, model_type, vocab, key
        self.longest, self.refusals = longest, refusals
        self.label, self.weights = "default", "from start"
        self.faults, self.calls, self.delete_before_load = [], [], False
        self.lock, self.connections = threading.Lock(), []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def routes(self):
        return [route for route, _ in self.calls]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
        for connection in self.connections:  # their threads would answer for ever
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        pass  # clients that go away are part of the tests


def draw(prompt, seed, count):
    """Tokens and log-probabilities: the stop token after ``seed % 5`` others, if there is room."""
    digest = hashlib.sha256(f"{prompt}{seed}".encode()).digest()
    tokens = [3 + byte % (VOCAB - 3) for byte in digest[: seed % 5]] + [STOP]
    return tokens[:count], [-1.0 - i / 8 for i in range(min(count, len(tokens)))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def setup(self):
        super().setup()
        self.server.connections.append(self.connection)

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.handle_call(None)

    def do_POST(self):
        self.handle_call(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def handle_call(self, body):
        fake, route = self.server, self.path.lstrip("/")
        with fake.lock:
            fake.calls.append((route, body))
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            return self.answer({"error": "Unauthorized"}, 401)
        call = getattr(self, route, None)
        if call is None or (route in ("begin_weight_update", "end_weight_update") and fake.version < "0.5.21"):
            return self.answer({"detail": "Not Found"}, 404)
        return call(body)

    def answer(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def accept(self, body):
        self.answer({"success": True, "message": ""})

    ready = accept
    begin_weight_update = end_weight_update = pause_generation = continue_generation = accept
    release_memory_occupation = resume_memory_occupation = accept

    def model_info(self, body):
        fake = self.server
        self.answer({"model_path": "/served", "weight_version": fake.label, "model_type": fake.model_type})

    def server_info(self, body):
        fake = self.server
        self.answer({"version": fake.version, "tp_size": 1, "max_req_input_len": fake.longest - 6})

    def flush_cache(self, body):
        with self.server.lock:
            self.server.refusals -= 1
            refused = self.server.refusals >= 0
        self.answer({"message": "requests are running" if refused else ""}, 400 if refused else 200)

    def update_weight_version(self, body):
        self.server.label = body["new_version"]
        self.accept(body)

    def update_weights_from_disk(self, body):
        directory = Path(body["model_path"])
        if self.server.delete_before_load:
            for file in directory.iterdir():
                file.unlink()
        if not (directory / "config.json").is_file():
            return self.answer({"success": False, "message": f"no weights in {directory}"}, 400)
        self.server.weights = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
        self.server.label = body["weight_version"]
        self.accept(body)

    def weights_checker(self, body):
        self.answer({"ranks": [{"per_gpu_checksum": self.server.weights}]})

    def generate(self, body):
        fake, sampling = self.server, body["sampling_params"]
        outside = [i for i in sampling.get("logit_bias", {}) if int(i) >= fake.vocab]
        if outside:
            return self.answer({"error": f"logit_bias must has keys in [0, {fake.vocab - 1}]"}, 400)
        with fake.lock:
            fault = fake.faults.pop(0) if fake.faults and "sampling_seed" in sampling else ""
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return self.connection.close()
        if fault == "die":
            os._exit(9)
        if fault == "hang":
            time.sleep(3.0)
        if fault == "500":
            return self.answer({"error": "internal"}, 500)
        if fault == "400":
            return self.answer({"error": "no such field"}, 400)
        if fault == "garbage":
            return self.answer(["?"])
        tokens, logps = draw(body["input_ids"], sampling.get("sampling_seed", 0), sampling["max_new_tokens"])
        return self.answer(self.completion(fault, body, tokens, logps))

    def completion(self, fault, body, tokens, logps):
        finish = {"type": "stop", "matched": STOP} if tokens[-1] == STOP else {"type": "length", "length": len(tokens)}
        if fault in ("abort", "empty"):
            finish = {"type": "abort", "message": "aborted"}
            tokens, logps = ([], []) if fault == "empty" else (tokens[:1], logps[:1])
        if fault == "nothing":
            tokens, logps = [], []
        if fault == "outside":
            tokens = [VOCAB + 5, *tokens[1:]]
        if fault == "other stop":
            tokens, finish = [*tokens[:-1], 7], {"type": "stop", "matched": 7}
        entries = [[None if fault == "null" else logp, token, None] for logp, token in zip(logps, tokens)]
        label = "older" if fault == "stale" else self.server.label
        spans = [{"version": label, "start": 0, "end": len(tokens)}]
        if fault == "two versions":
            spans = [{"version": "older", "start": 0, "end": 1}, {"version": label, "start": 1, "end": len(tokens)}]
        meta = {
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": min(2, len(body["input_ids"])),
            "weight_version": label,
            "output_token_logprobs": entries[:-1] if fault == "short" else entries,
        }
        if self.server.version >= "0.5.19":
            meta["weight_versions"] = spans
        return {"output_ids": tokens, "meta_info": meta}


def main(arguments):
    flags = dict(flag.lstrip("-").split("=", 1) for flag in arguments if "=" in flag)
    print("loading", flags.get("model-path"), flush=True)
    if "crash" in flags:
        print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
        sys.exit(3)
    if "slow" in flags:
        time.sleep(60)
    Fake(int(flags["port"]), key=flags.get("api-key", "")).serve_forever(0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
