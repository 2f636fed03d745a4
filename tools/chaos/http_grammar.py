"""Requests that nobody should send to an engine: a grammar of HTTP/1.1 and of the engine's JSON, and
mutations of it, each from a seed.

Two things are kept from mutation, so that the engine that is attacked stays the same: an update of
weights names the checksum of the weights that are in use, and no request is `slow` by itself (the
model's context is short).
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import string
import zlib
from collections.abc import Callable, Sequence

from slime.backends.torch_engine.sampling_params import PARSERS, UNSUPPORTED

# What the client does when it has sent everything.
WAIT, SHUT, RESET, LEAVE = "wait", "shut", "reset", "leave"
GENERATE, FROM_TENSOR = "/generate", "/update_weights_from_tensor"
HEALTH = "/health"
ROUTES: dict[str, tuple[str, ...]] = {
    GENERATE: ("POST",),
    "/abort_request": ("POST",),
    "/pause_generation": ("POST",),
    "/continue_generation": ("POST",),
    "/flush_cache": ("GET", "POST"),
    "/update_weights_from_disk": ("POST",),
    FROM_TENSOR: ("POST",),
    HEALTH: ("GET",),
    "/health_generate": ("GET",),
    "/get_model_info": ("GET",),
    "/model_info": ("GET",),
    "/get_server_info": ("GET",),
    "/server_info": ("GET",),
    "/get_load": ("GET",),
    "/v1/models": ("GET",),
    "/get_weight_version": ("GET",),
    "/weight_version": ("GET",),
    "/weights_checksum": ("GET",),
}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PURGE",
           "get", "G\tET", "", "M-SEARCH", "X" * 5000, "PO\x00ST")  # fmt: skip
NUMBERS = ("0", "-1", "1", "2", "3.0", "0.5", "-0.0", "2147483647", "2147483648", "1e6", "1e-6", "1e308",
           "1e309", "1e-308", "5e-324", "9223372036854775807", "9223372036854775808",
           "18446744073709551615", "18446744073709551616", "-9223372036854775809", "1" + "0" * 400,
           "0." + "3" * 400, "1e999999999", "0x10", "01", "+1", ".5", "NaN", "-Infinity")  # fmt: skip
TEXTS = ("", "a", "0", "\\u0000", "\\ud800", "\\udc00\\ud800", "\u202e", "\U0001f600" * 20, "\\n" * 50,
         "/", "../..", "/etc/passwd", "/dev/zero", "/proc/self/mem", "x" * 300, "x" * 5000,
         "/" + "d/" * 3000, "%s%n", "{}", "[1,", "null", "true", "<|im_end|>", "in_place", "abort")  # fmt: skip
OTHERS = ("null", "true", "false", "[]", "{}", "[[]]", "[null]", "[1,null]", '["",1]', "[-1]", "[104]",
          "[5,6]", "[[5],[6]]", "[9223372036854775808]", '{"a":1}', "[" * 900 + "]" * 900, "[" * 1100,
          '{"a":' * 900 + "1" + "}" * 900, "[" + "5," * 700 + "5]", "", " ", "nul", "'a'", "[1,]")  # fmt: skip
FIELDS: dict[str, tuple[str, ...]] = {
    GENERATE: (
        "input_ids", "text", "rid", "sampling_params", "return_logprob", "logprob_start_len", "stream",
        "return_arrays", "return_text_in_logprobs", "lora_path", "image_data", "input_embeds", "extra",
    ),
    "/abort_request": ("rid", "abort_all"),
    "/pause_generation": ("mode",),
    "/continue_generation": ("mode",),
    "/flush_cache": ("x",),
    "/update_weights_from_disk": ("model_path", "weight_version", "abort_all_requests", "flush_cache"),
}  # fmt: skip
# How often each kind of mutation is drawn.
KINDS: dict[str, float] = {
    "value of a field": 30, "any JSON": 8, "damaged bytes": 10, "encoding": 4, "method": 4, "target": 5,
    "header": 8, "framing": 6, "cut": 5, "slow": 2, "pipelined": 6, "key": 6, "not HTTP/1.1": 3,
    "weights": 2, "gone client": 1, "large": 0.02,
}  # fmt: skip
PARAMS = (*PARSERS, *UNSUPPORTED, "unknown")


@dataclasses.dataclass(frozen=True)
class Attack:
    """Bytes for one connection. `methods`: of the requests that were sent whole, one answer each;
    `must_answer`: an end of the connection without any is a fault; `keys`: whether each brings the
    engine's key (None: it does not matter).
    """

    kind: str
    parts: tuple[bytes, ...]
    methods: tuple[str, ...] = ("POST",)
    must_answer: bool = False
    keys: tuple[bool | None, ...] = (None,)
    after: str = WAIT
    pause_s: float = 0.0
    is_heavy: bool = False


@dataclasses.dataclass(frozen=True)
class Victim:
    """What an attacker knows of the engine: its key, the folder, the bytes and the checksum of its
    weights.
    """

    key: str
    folder: str
    weights: bytes
    checksum: str


@dataclasses.dataclass
class Message:
    """One request before it is written down."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    framing: str = "length"  # or "chunked", or "none"

    def rendered(self, chunk: int = 0) -> bytes:
        """Its bytes; chunked bodies in chunks of `chunk`."""
        lines = [f"{self.method} {self.target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        body = self.body
        if self.framing == "length" and (body or self.method == "POST"):
            lines.append(f"Content-Length: {len(body)}")
        elif self.framing == "chunked":
            lines.append("Transfer-Encoding: chunked")
            body = chunked(body, chunk or max(1, len(body)))
        head = "\r\n".join(lines) + "\r\n\r\n"
        return head.encode("utf-8", errors="surrogateescape") + body


def chunked(body: bytes, size: int) -> bytes:
    """`body` in the chunked coding."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class Grammar:
    """Attacks on one engine. `attack(rng)` draws one; the same generator gives the same bytes."""

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._draw: dict[str, Callable[[random.Random], Attack]] = {
            "value of a field": self._value,
            "any JSON": self._any_json,
            "damaged bytes": self._damaged,
            "encoding": self._encoding,
            "method": self._method,
            "target": self._target,
            "header": self._header,
            "framing": self._framing,
            "cut": self._cut,
            "slow": self._slow,
            "pipelined": self._pipelined,
            "key": self._key,
            "not HTTP/1.1": self._no_http,
            "weights": self._weights,
            "gone client": self._gone,
            "large": self._large,
        }

    def attack(self, rng: random.Random, kinds: Sequence[str] = ()) -> Attack:
        """One attack, of one of `kinds` where there are any."""
        names = kinds or list(KINDS)
        (name,) = rng.choices(names, [KINDS[name] for name in names])
        return self._draw[name](rng)

    # ---- whole requests ----

    def headers(self, *, key: str | None = None) -> list[tuple[str, str]]:
        """Headers of a good request."""
        return [
            ("Host", "127.0.0.1"),
            ("Content-Type", "application/json"),
            ("Authorization", f"Bearer {self._victim.key if key is None else key}"),
        ]

    def good(self, seed: int) -> Message:
        """A request whose answer is the same at any time."""
        params = {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": seed}
        fields = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": params}
        body = json.dumps(fields)
        return Message("POST", GENERATE, self.headers(), body.encode())

    def valid(self, rng: random.Random) -> Message:
        """A request to any route that the engine serves or refuses by a value only."""
        path = rng.choice(list(ROUTES))
        method = rng.choice(ROUTES[path])
        if path == FROM_TENSOR:
            return self._tensor_message(rng, self._victim.weights[: rng.choice((0, 8, 100))])
        body = _object(self._fields(rng, path)) if method == "POST" else ""
        return Message(method, path, self.headers(), body.encode())

    def _fields(self, rng: random.Random, path: str) -> dict[str, str]:
        """Valid fields of a body, as JSON texts."""
        if path == GENERATE:
            fields = {"sampling_params": _object(_params(rng))}
            if rng.random() < 0.7:
                fields["input_ids"] = rng.choice(
                    ("[5,6]", "[[5,6],[7]]", "[5]", "[" + "9," * 40 + "9]")
                )
            else:
                fields["text"] = rng.choice(('"ab"', '["a","b c"]', '"1+1="'))
            for name in ("return_logprob", "stream", "return_arrays", "return_text_in_logprobs"):
                if rng.random() < 0.2:
                    fields[name] = rng.choice(("true", "false"))
            return fields
        if path == "/abort_request":
            return {"rid": '"x"'} if rng.random() < 0.9 else {"abort_all": "true"}
        if path == "/pause_generation":
            return {"mode": rng.choice(('"in_place"', '"abort"'))}
        if path == "/update_weights_from_disk":
            return {"model_path": f'"{self._victim.folder}"', "weight_version": '"0"'}
        return {}

    def _checked(self, kind: str, message: Message, *, must_answer: bool = True) -> Attack:
        return Attack(kind, (message.rendered(),), (message.method,), must_answer, (True,))

    # ---- mutations ----

    def _value(self, rng: random.Random) -> Attack:
        path = GENERATE if rng.random() < 0.75 else rng.choice([*FIELDS])
        fields = self._fields(rng, path)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if path == GENERATE and rng.random() < 0.6:
                params = _params(rng)
                params[rng.choice(PARAMS)] = hostile(rng)
                fields["sampling_params"] = _object(params)
            else:
                fields[rng.choice(FIELDS[path])] = hostile(rng)
        text = _object(fields)
        if rng.random() < 0.05:  # a name twice
            text = text[:-1] + ',"input_ids":' + hostile(rng) + "}"
        return self._checked("value of a field", self._post(path, text))

    def _post(self, path: str, text: str) -> Message:
        body = text.encode("utf-8", errors="surrogatepass")
        return Message("POST", path, self.headers(), body)

    def _any_json(self, rng: random.Random) -> Attack:
        return self._checked("any JSON", self._post(rng.choice([*FIELDS]), json_text(rng, 4)))

    def _damaged(self, rng: random.Random) -> Attack:
        path = rng.choice((GENERATE, GENERATE, *FIELDS))
        body = bytearray(_object(self._fields(rng, path) or {"a": "1"}).encode())
        damage(body, rng)
        return self._checked("damaged bytes", Message("POST", path, self.headers(), bytes(body)))

    def _encoding(self, rng: random.Random) -> Attack:
        path = rng.choice((GENERATE, *FIELDS))
        text = _object(self._fields(rng, path))
        body, headers = text.encode(), self.headers()
        codec = rng.choice(("utf-16", "utf-32", "utf-7", "utf-8-sig", "gzip", "deflate", "broken gzip",
                            "bomb", "br", "charset", "identity", "many"))  # fmt: skip
        if codec == "gzip":
            body, coding = gzip.compress(body, mtime=0), "gzip"
        elif codec == "deflate":
            body, coding = zlib.compress(body), "deflate"
        elif codec == "broken gzip":
            body, coding = gzip.compress(body, mtime=0)[: rng.randrange(1, 30)] + b"x" * 9, "gzip"
        elif codec == "bomb":
            body, coding = (
                gzip.compress(b" " * rng.choice((10**5, 10**6, 2 * 10**7)), 1, mtime=0),
                "gzip",
            )
        elif codec in ("br", "identity"):
            coding = codec
        elif codec == "many":
            coding = ", ".join(["gzip"] * 30)
        else:
            coding = ""
            if codec == "charset":
                headers[1] = ("Content-Type", f"application/json; charset={rng.choice(TEXTS[:9])}")
            else:
                body = text.encode(codec)
        if coding:
            headers.append(("Content-Encoding", coding))
        return self._checked("encoding", Message("POST", path, headers, body), must_answer=False)

    def _method(self, rng: random.Random) -> Attack:
        method = rng.choice(METHODS)
        body = b"{}" if rng.random() < 0.5 else b""
        message = Message(method, rng.choice([*ROUTES]), self.headers(), body)
        return Attack("method", (message.rendered(),), (method,), False, (True,))

    def _target(self, rng: random.Random) -> Attack:
        path = rng.choice([*ROUTES])
        target = rng.choice((
            f"/{path}", f"{path}/", path.replace("e", "%65"), f"{path}%00", f"{path}?{'a=b&' * 900}",
            f"{path}?weight_version=%ff%fe&begin=%", f"{path}#x", f"http://127.0.0.1{path}",
            f"http://[::1{path}", f"http://a:b@c:99999{path}", f"https://example.org{path}", "*", "",
            f"{path};x=1", f"/..{path}", "/." * 4000, f"{path}?{'x' * 9000}", "\u00e9", "/\udcff",
            "//", "http://", ":80", f"{path} HTTP/1.1 x", f"/{rng.choice(TEXTS)}", "/%", "/%zz",
            f"{path}?a[]=1&a[]=2&%00=%00", "\\..\\", "/\u202e", "?", "#", f"{path}?=&=&;",
        ))  # fmt: skip
        message = Message(rng.choice(("GET", "POST")), target, self.headers(), b"")
        return Attack("target", (message.rendered(),), (message.method,), False, (None,))

    def _header(self, rng: random.Random) -> Attack:
        message = self.valid(rng)
        for _ in range(rng.choice((1, 1, 2))):
            extra = rng.choice(_HEADERS)
            if rng.random() < 0.5 and extra[0] in [name for name, _ in message.headers]:
                message.headers = [pair for pair in message.headers if pair[0] != extra[0]]
            message.headers.insert(rng.randrange(len(message.headers) + 1), extra)
        if rng.random() < 0.1:
            message.headers += [
                (f"X-{number}", "y" * 50) for number in range(rng.choice((50, 200)))
            ]
        rng.shuffle(message.headers)
        return Attack("header", (message.rendered(),), (message.method,), False, (None,))

    def _framing(self, rng: random.Random) -> Attack:
        path = rng.choice((GENERATE, "/abort_request", FROM_TENSOR))
        body = _object(self._fields(rng, path)).encode()
        head = Message("POST", self._with_checksum(path), self.headers(), b"", "none").rendered()[
            :-2
        ]
        length = rng.choice(("-1", "+5", "0x10", " 5", "5 5", "5,5", "", "1e3", "9" * 30, "0", "1",
                             str(len(body) + 7), str(max(0, len(body) - 3)), "18446744073709551616"))  # fmt: skip
        size = rng.randrange(1, 20)
        chunks = chunked(body, size)
        case = rng.randrange(10)
        if case == 0:
            raw = head + f"Content-Length: {length}\r\n\r\n".encode() + body
        elif case == 1:
            both = f"Content-Length: {length}\r\nContent-Length: {len(body)}\r\n\r\n"
            raw = head + both.encode() + body
        elif case == 2:
            both = f"Transfer-Encoding: chunked\r\nContent-Length: {len(body)}\r\n\r\n"
            raw = head + both.encode() + chunks
        elif case == 3:
            coding = rng.choice(
                ("chunked, chunked", "gzip, chunked", "xchunked", "identity", "chunked\x0b")
            )
            raw = head + f"Transfer-Encoding: {coding}\r\n\r\n".encode() + chunks
        else:
            broken = bytearray(chunks)
            if case == 4:
                damage(broken, rng)
            elif case == 5:
                broken = bytearray(b"f" * rng.choice((8, 17, 400)) + b"\r\n" + chunks)
            elif case == 6:
                broken = bytearray(chunks.replace(b"\r\n", b";ext=" + b"v" * 200 + b"\r\n", 1))
            elif case == 7:
                broken = bytearray(chunks[:-2] + b"Trailer: x\r\n" * rng.choice((1, 300)) + b"\r\n")
            elif case == 8:
                broken = bytearray(chunks.replace(b"\r\n", b"\n"))
            raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + bytes(broken)
        return Attack("framing", (raw,), ("POST",), False, (None,), rng.choice((WAIT, SHUT)))

    def _cut(self, rng: random.Random) -> Attack:
        raw = self.valid(rng).rendered()
        cut = raw[: rng.randrange(1, len(raw))]
        after = rng.choice((SHUT, RESET, LEAVE))
        return Attack("cut", (cut,), ("POST",), False, (None,), after)

    def _slow(self, rng: random.Random) -> Attack:
        message = self.valid(rng)
        message.framing = rng.choice(("length", "chunked")) if message.body else "length"
        raw = message.rendered(chunk=5)
        places = sorted(rng.randrange(1, len(raw)) for _ in range(rng.randrange(1, 9)))
        parts = [
            raw[start:end] for start, end in zip([0, *places], [*places, len(raw)], strict=True)
        ]
        methods, pause_s = (message.method,), rng.choice((0.005, 0.05, 0.3))
        return Attack("slow", tuple(parts), methods, True, (True,), WAIT, pause_s)

    def _pipelined(self, rng: random.Random) -> Attack:
        messages = [self.valid(rng) for _ in range(rng.choice((2, 3, 5, 16)))]
        raw = b"".join(message.rendered() for message in messages)
        methods = tuple(message.method for message in messages)
        return Attack("pipelined", (raw,), methods, True, (True,) * len(messages))

    def _key(self, rng: random.Random) -> Attack:
        """Requests that lack the key: no route but the bare health word may serve them."""
        message, key = self.valid(rng), self._victim.key
        wrong = rng.choice((
            None, "", "Bearer", "Bearer ", f"bearer {key}", f"Bearer  {key}", f"Bearer {key}x",
            f"Bearer {key[:-1]}", f"Basic {key}", key, f"Bearer {key}, Bearer {key}", "Bearer \u00e9",
            f"Bearer {key.swapcase()}", "Bearer " + "x" * 5000, "\udcff", f"Bearer {key}\t{key}",
        ))  # fmt: skip
        message.headers = message.headers[:2]
        if wrong is not None:
            message.headers.append(("Authorization", wrong))
        if rng.random() < 0.2:  # the key where no one looks for it
            message.headers.append(
                (rng.choice(("X-Api-Key", "Cookie", "Proxy-Authorization")), key)
            )
        is_open = message.target == HEALTH
        keys = (None if is_open else False,)
        return Attack("key", (message.rendered(),), (message.method,), True, keys)

    def _no_http(self, rng: random.Random) -> Attack:
        raw = rng.choice((
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(60),
            rng.randbytes(rng.randrange(1, 500)), b"GET /health\r\n\r\n", b"GET /health HTTP/0.9\r\n\r\n",
            b"GET /health HTTP/1.0\r\n\r\n", b"GET /health HTTP/3.7\r\n\r\n", b"\r\n" * 50, b"\x00" * 100,
            b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n", b"POST /generate HTTP/1.1\r\n\r\n" * 3,
            b"GET " + b"/" * 70000, b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5000,
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"GET /health HTTP/1.1\r\n Host: x\r\n\r\n",
        ))  # fmt: skip
        return Attack(
            "not HTTP/1.1", (raw,), ("GET",), False, (None,), rng.choice((WAIT, SHUT, RESET))
        )

    def _with_checksum(self, path: str) -> str:
        if path != FROM_TENSOR:
            return path
        sums = f"checksum={self._victim.checksum}&total_checksum={self._victim.checksum}"
        return f"{path}?weight_version=0&{sums}"

    def _tensor_message(self, rng: random.Random, body: bytes) -> Message:
        target = self._with_checksum(FROM_TENSOR)
        for name in ("begin", "end", "abort_all_requests"):
            if rng.random() < 0.3:
                target += f"&{name}={rng.choice(('true', 'false', '0', '1', 'x', ''))}"
        headers = self.headers()
        headers[1] = ("Content-Type", "application/octet-stream")
        return Message("POST", target, headers, body)

    def _weights(self, rng: random.Random) -> Attack:
        """A safetensors body with a broken header or broken values, or the whole one."""
        weights = self._victim.weights
        length = int.from_bytes(weights[:8], "little")
        header = bytearray(weights[8 : 8 + length])
        case = rng.randrange(6)
        if case == 0:
            body = (
                rng.choice((2**63, 2**64 - 1, 0, length * 2, 2**31)).to_bytes(8, "little") + header
            )
        elif case == 1:
            damage(header, rng)
            body = len(header).to_bytes(8, "little") + header + weights[8 + length :]
        elif case == 2:
            changed = bytearray(weights)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            body = bytes(changed)
        elif case == 3:
            body = weights[: rng.randrange(len(weights))]
        elif case == 4:
            text = json_text(rng, 5).encode("utf-8", errors="surrogatepass")
            body = len(text).to_bytes(8, "little") + text + b"\0" * 64
        else:
            body = weights
        return self._checked("weights", self._tensor_message(rng, bytes(body)))

    def _gone(self, rng: random.Random) -> Attack:
        """A client that leaves while its response is generated, or while it is streamed."""
        fields = self._fields(rng, GENERATE)
        fields["sampling_params"] = '{"max_new_tokens":90,"ignore_eos":true}'
        if rng.random() < 0.6:
            fields["stream"] = "true"
        raw = self._post(GENERATE, _object(fields)).rendered()
        after = rng.choice((RESET, SHUT, LEAVE))
        return Attack(
            "gone client", (raw, b""), ("POST",), False, (True,), after, rng.choice((0.0, 0.02))
        )

    def _large(self, rng: random.Random) -> Attack:
        """Long bodies, and short ones that ask for much."""
        size = int(10 ** rng.uniform(5, 7.78))
        repeats = rng.choice(
            ("[],", "{},", "1,", "1000,", "1.5,", '"a",', '"\\u00e9",', "[[[],[]]],")
        )
        ids = "[" + "5," * 7 + "5]"
        num_prompts = rng.choice((256, 4096, 16384))
        few = '{"max_new_tokens":1,"ignore_eos":true}'
        texts: tuple[Callable[[], str], ...] = (
            lambda: '{"input_ids":[' + repeats * (size // len(repeats)) + "5]}",
            lambda: "[" * size,
            lambda: '{"text":"' + "a" * size + '"}',
            lambda: '{"text":"' + "\\u0061" * (size // 6) + '"}',
            lambda: '{"rid":' + "1" * size + "}",
            lambda: "{" + ",".join(f'"{number}":0' for number in range(size // 12)) + "}",
            lambda: (
                '{"input_ids":['
                + ",".join([ids] * num_prompts)
                + '],"sampling_params":'
                + few
                + "}"
            ),
            lambda: (
                '{"input_ids":[' + ",".join([ids] * num_prompts) + '],"return_logprob":true,'
                '"sampling_params":[' + ",".join([few] * num_prompts) + "]}"
            ),
            lambda: (
                '{"input_ids":['
                + ",".join([ids] * rng.choice((16, 64)))
                + '],"return_logprob":true,"sampling_params":'
                '{"n":1024,"max_new_tokens":1}}'
            ),
            lambda: (
                '{"text":['
                + ",".join(['"' + "b" * 100 + '"'] * num_prompts)
                + '],"sampling_params":'
                + few
                + "}"
            ),
            lambda: (
                '{"input_ids":[5],"stream":true,"sampling_params":{"max_new_tokens":100,"stop":'
                + str(["x" * 1000 + str(number) for number in range(64)]).replace("'", '"')
                + "}}"
            ),
        )
        message = self._post(GENERATE, rng.choice(texts)())
        return dataclasses.replace(self._checked("large", message), is_heavy=True)


_HEADERS = (
    ("Host", "example.org"), ("Host", "localhost:1"), ("Host", "127.0.0.1.example.org"), ("Host", ""),
    ("Host", "[::1]"), ("Host", "[::1"), ("Host", "127.0.0.1, example.org"), ("Host", "a" * 3000),
    ("Host", "\u00e9"), ("Host", "127.0.0.1:99999999"), ("Host", "user@127.0.0.1"), ("Host", "%"),
    ("Content-Type", "text/plain"), ("Content-Type", ""), ("Content-Type", "application/json;" * 50),
    ("Content-Type", "multipart/form-data; boundary=" + "b" * 200), ("Content-Type", "/"),
    ("Expect", "100-continue"), ("Expect", "200-ok"), ("Upgrade", "websocket"), ("Upgrade", "h2c"),
    ("Connection", "close"), ("Connection", "upgrade"), ("Connection", "keep-alive, close"),
    ("Connection", "x" * 4000), ("Cookie", "a=b; " * 400), ("Cookie", "\udcff=\x7f"),
    ("Range", "bytes=0-,-1"), ("If-Modified-Since", "never"), ("Date", "x"), ("Via", "1.1 x"),
    ("Origin", "http://example.org"), ("Origin", "null"), ("Sec-Fetch-Site", "cross-site"),
    ("Accept-Encoding", "gzip;q=NaN, *"), ("Accept", "*/*;q=" + "9" * 300), ("TE", "trailers"),
    ("Content-Encoding", "gzip"), ("Content-Length", "4"), ("Content-Length", "-4"),
    ("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "identity"), ("X-Forwarded-For", "::1"),
    ("X-Forwarded-Host", "127.0.0.1"), ("Forwarded", "for=\"[::1]\";" * 60), ("X", "y" * 9000),
    ("X-Http-Method-Override", "DELETE"), ("Sec-WebSocket-Key", "x"), ("Sec-WebSocket-Version", "13"),
    ("Content-Length ", "4"), (" X", "y"), ("X Y", "z"), ("", "empty"), ("X\x00", "y"), ("X", "a\x00b"),
    ("X", "a\r\n folded"), ("X", "a\nInjected: b"), ("Authorization", ""), ("Authorization", "Bearer"),
)  # fmt: skip


def _params(rng: random.Random) -> dict[str, str]:
    params = {"max_new_tokens": rng.choice(("0", "1", "2", "3"))}
    if rng.random() < 0.3:
        name, value = rng.choice((
            ("temperature", "0"), ("top_p", "0.5"), ("top_k", "3"), ("min_p", "0.1"), ("n", "2"),
            ("stop", '"b"'), ("stop_token_ids", "[5]"), ("sampling_seed", "7"), ("ignore_eos", "true"),
            ("repetition_penalty", "1.5"), ("frequency_penalty", "-2"), ("min_new_tokens", "1"),
        ))  # fmt: skip
        params[name] = value
    return params


def _object(fields: dict[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def hostile(rng: random.Random) -> str:
    """A JSON text, or what looks like one, that a field seldom gets."""
    case = rng.random()
    if case < 0.35:
        return rng.choice(NUMBERS)
    if case < 0.6:
        return f'"{rng.choice(TEXTS)}"'
    if case < 0.9:
        return rng.choice(OTHERS)
    return json_text(rng, 3)


def json_text(rng: random.Random, depth: int) -> str:
    """A random JSON text of at most `depth` levels."""
    case = rng.random()
    if depth == 0 or case < 0.4:
        return rng.choice((rng.choice(NUMBERS), f'"{rng.choice(TEXTS)}"', "null", "true", "5"))
    items = [json_text(rng, depth - 1) for _ in range(rng.randrange(5))]
    if case < 0.7:
        return "[" + ",".join(items) + "]"
    names = [rng.choice((*FIELDS[GENERATE], *PARAMS, *string.ascii_letters[:4])) for _ in items]
    return "{" + ",".join(f'"{name}":{item}' for name, item in zip(names, items, strict=True)) + "}"


def damage(content: bytearray, rng: random.Random) -> None:
    """Changes some bytes of `content` in place: flips, cuts, copies, insertions."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(content)) if content else 0
        case = rng.randrange(5)
        if case == 0 and content:
            content[place] ^= 1 << rng.randrange(8)
        elif case == 1:
            del content[place:]
        elif case == 2:
            content[place:place] = rng.choice(_TOKENS)
        elif case == 3:
            end = place + rng.randrange(1, 9)
            content[place:place] = content[place:end] * rng.choice((1, 3, 40))
        else:
            content[place : place + rng.randrange(1, 5)] = rng.randbytes(rng.randrange(4))


_TOKENS: Sequence[bytes] = (
    b"[", b"]", b"{", b"}", b'"', b"\\", b",", b":", b"\x00", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"e",
    b"-", b"9" * 40, b"/*x*/", b"//", b"\\u12", b"\xef\xbb\xbf", b"NaN", b"\r\n",
)  # fmt: skip
