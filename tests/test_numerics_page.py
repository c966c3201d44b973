"""docs/numerics.md, implemented from that page alone in exact integer arithmetic, against what the library prints.

An f32 is a Python float that holds its value; the constants and the golden table are read out of the page."""

import math
import re
import struct
import subprocess

import house

PAGE = (house.SOURCE / "docs/numerics.md").read_text()
DRIVER = house.BUILD / "tests/numerics_driver"
SMALLEST = 2.0 ** -126


# ---- 1. Arithmetic

def nearest(sign, n, d):
    """The f32 for the positive rational n / d: 24 bits, ties to even, tiny after rounding gives zero."""
    exponent = n.bit_length() - d.bit_length()
    if n << max(-exponent, 0) < d << max(exponent, 0):
        exponent -= 1
    shift = 23 - exponent
    n, d = n << max(shift, 0), d << max(-shift, 0)
    q, rest = divmod(n, d)
    q += 2 * rest > d or (2 * rest == d and q & 1)
    if q.bit_length() + exponent - 23 > 128:
        return sign * math.inf
    value = math.ldexp(q, exponent - 23)
    return sign * (value if value >= SMALLEST else 0.0)


def read(f):
    """An operand, as an operation sees it."""
    return math.copysign(0.0, f) if abs(f) < SMALLEST else f


def exact_sum(p, c):
    """p + c rounded once; p and c are doubles. A double sum finds zeros, Inf and NaN, with the sign that IEEE gives them."""
    s = p + c
    if s == 0 or not math.isfinite(s):
        return s
    (pn, pd), (cn, cd) = p.as_integer_ratio(), c.as_integer_ratio()
    n = pn * cd + cn * pd
    return nearest(1.0 if n > 0 else -1.0, abs(n), pd * cd)


def fma(a, b, c):
    return exact_sum(read(a) * read(b), read(c))  # a product of two f32 is exact in a double


def add(a, b):
    return exact_sum(read(a), read(b))


def mul(a, b):
    product = read(a) * read(b)
    return product if product == 0 else exact_sum(product, 0.0)


def one_over(d):
    if not math.isfinite(d):
        return 1.0 / d
    n, denominator = d.as_integer_ratio()
    return nearest(1.0, denominator, n)


# ---- 2. Storage

def f32(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of(f):
    return 0x7FC00000 if math.isnan(f) else struct.unpack("<I", struct.pack("<f", f))[0]


def widen_f16(b):
    s, m = (b & 0x8000) << 16, b & 0x7FFF
    if m >= 0x7C00:
        return f32(s | 0x7F800000 | (m & 0x3FF) << 13)
    if m >= 0x400:
        return f32(s | ((m << 13) + 0x38000000))
    return math.copysign(m * 2.0 ** -24, -1.0 if s else 1.0)


def round_f16(u):
    s, m = (u >> 16) & 0x8000, u & 0x7FFFFFFF
    if m > 0x7F800000:
        return 0x7E00
    if m >= 0x477FF000:
        return s | 0x7C00
    if m >= 0x38800000:
        return s | (m - 0x38000000 + 0xFFF + ((m >> 13) & 1)) >> 13
    return s | round(f32(m) * 2.0 ** 24)  # Python's round takes ties to even


def round_bf16(u):
    return 0x7FC0 if u & 0x7FFFFFFF > 0x7F800000 else (u + 0x7FFF + ((u >> 16) & 1)) >> 16 & 0xFFFF


def round_f32(u):
    return 0x7FC00000 if u & 0x7FFFFFFF > 0x7F800000 else u


WIDEN = {"f32": f32, "bf16": lambda b: f32(b << 16), "f16": widen_f16}
ROUND = {"f32": round_f32, "bf16": round_bf16, "f16": round_f16}


def rounded(dtype, f):
    return ROUND[dtype](bits_of(f))


# ---- 3. The pair chain

def chain(a, b):
    acc = 0.0
    for block in range(0, len(a), 32):
        at, bt = a[block:block + 32], b[block:block + 32]
        at, bt = at + [0.0] * (32 - len(at)), bt + [0.0] * (32 - len(bt))
        e = o = 0.0
        for i in range(0, 32, 2):
            e = fma(at[i], bt[i], e)
            o = fma(at[i + 1], bt[i + 1], o)
        acc = add(acc, add(e, o))
    return acc


# ---- 4. The activation

CONSTANTS = {name: f32(int(bits, 16)) for name, bits in re.findall(r"\| ([A-Z0-9]+) \| `([0-9a-f]{8})`", PAGE)}


def exp(x):
    k = CONSTANTS
    if math.isnan(x):
        return x
    x = k["LEAST"] if x < k["LEAST"] else x
    x = k["MOST"] if x > k["MOST"] else x
    t = add(mul(x, k["LOG2E"]), k["SHIFT"])
    n = add(t, -k["SHIFT"])
    r = fma(n, k["LO"], fma(n, k["HI"], x))
    p = fma(k["C5"], r, k["C4"])
    for name in ("C3", "C2", "C1", "C0"):
        p = fma(p, r, k[name])
    p = add(fma(p, mul(r, r), r), 1.0)
    return f32(bits_of(p) + ((bits_of(t) - 0x4B400000) << 23) & 0xFFFFFFFF)


def sigmoid(x):
    return one_over(add(1.0, exp(-x)))


def gated(activation, gate, up):
    alpha, limit, offset = activation
    gate = limit if gate > limit else gate
    up = limit if up > limit else up
    up = -limit if up < -limit else up
    if offset != 0:
        up = add(up, offset)
    s = sigmoid(mul(alpha, gate) if alpha != 1 else gate)
    return mul(mul(gate, s), up)


# ---- 5, 6. One token, forward

class Layer:
    def __init__(self, dtype, sizes, kn, halves, activation):
        self.dtype, self.kn, self.halves, self.activation = dtype, kn, halves, activation
        self.T, self.H, self.I, self.E, self.K = sizes
        self.up_bias = self.down_bias = None

    def wide(self, stored):
        return [WIDEN[self.dtype](b) for b in stored]

    def project(self, row, matrix, expert, columns, bias):
        """The rounded columns of row times this expert's [terms,columns] (or, in the other layout, its transpose)."""
        terms = len(row)
        own = matrix[expert * terms * columns:(expert + 1) * terms * columns]
        out = []
        for c in range(columns):
            v = chain(row, own[c::columns] if self.kn else own[c * terms:(c + 1) * terms])
            if bias is not None:
                v = add(v, bias[expert * columns + c])
            out.append(rounded(self.dtype, v))
        return out

    def slot(self, row, expert):
        gate_up = self.project(row, self.up, expert, 2 * self.I, self.up_bias)
        wide = self.wide(gate_up)
        gates, ups = (wide[:self.I], wide[self.I:]) if self.halves else (wide[0::2], wide[1::2])
        a = [rounded(self.dtype, gated(self.activation, g, u)) for g, u in zip(gates, ups)]
        return gate_up, a, self.project(self.wide(a), self.down, expert, self.H, self.down_bias)

    def forward(self):
        """All as stored: gate_up, a and out of the slots that are not masked, then y."""
        gate_ups, activations, outs, y = [], [], [], []
        for t in range(self.T):
            acc = [0.0] * self.H
            for k in range(t * self.K, (t + 1) * self.K):
                if self.ids[k] == -1:
                    continue
                gate_up, a, out = self.slot(self.x[t * self.H:(t + 1) * self.H], self.ids[k])
                acc = [fma(self.weights[k], value, total) for value, total in zip(self.wide(out), acc)]
                gate_ups, activations, outs = gate_ups + gate_up, activations + a, outs + out
            y += [rounded(self.dtype, total) for total in acc]
        return gate_ups, activations, outs, y


# ---- 10. Golden checks

class Draws:
    def __init__(self, seed):
        self.state = seed

    def next(self):
        mask = 2 ** 64 - 1
        self.state = z = self.state + 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    def tensor(self, dtype, count, scale):
        values = [((self.next() >> 40) * 2.0 ** -24 * 2 - 1) * scale for _ in range(count)]
        return [WIDEN[dtype](rounded(dtype, value)) for value in values]


def checksum(dtype, tensors):
    form = "<I" if dtype == "f32" else "<H"
    value = 0xCBF29CE484222325
    for stored in (element for tensor in tensors for element in tensor):
        for byte in struct.pack(form, stored):
            value = (value ^ byte) * 0x100000001B3 & 2 ** 64 - 1
    return value


def golden_rows():
    """case, seed, dtype, weights, gating, biased, clamped, xs, us, checksum"""
    for line in PAGE.splitlines():
        match = re.fullmatch(r"\| (\S+) \| (\d+) \| (\w+) \| (kn|nk) \| (\w+) \| (\w+) \| (\w+) \| (\S+) \| (\S+) "
                             r"\| `([0-9a-f]{16})` \|", line)
        if match:
            yield match.groups()


def scale_of(text):
    base, _, power = text.partition("^")
    return float(base) ** int(power or 1)


def golden(row):
    _, seed, dtype, weights, gating, biased, clamped, xs, us, _ = row
    activation = (f32(0x3FD9DB23), 7.0, 1.0) if clamped == "yes" else (1.0, math.inf, 0.0)
    layer = Layer(dtype, (4, 70, 37, 3, 3), weights == "kn", gating == "halves", activation)
    draws = Draws(int(seed))
    layer.x = draws.tensor(dtype, 4 * 70, scale_of(xs))
    layer.up = draws.tensor(dtype, 3 * 70 * 2 * 37, scale_of(us))
    layer.down = draws.tensor(dtype, 3 * 37 * 70, 0.5)
    if biased == "yes":
        layer.up_bias = draws.tensor(dtype, 3 * 2 * 37, 1.0)
        layer.down_bias = draws.tensor(dtype, 3 * 70, 1.0)
    layer.weights = draws.tensor("f32", 4 * 3, 1.0)
    layer.ids = [draws.next() % 4 - 1 for _ in range(4 * 3)]
    return checksum(dtype, layer.forward())


# ---- the comparison

def numbers(text):
    return [int(word, 16) for word in text.split(",")]


class Page(house.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lines = {}
        for line in subprocess.run([DRIVER], check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines():
            word, *rest = line.split()
            cls.lines.setdefault(word, []).append(rest)

    def cases(self, word, least):
        self.assertGreater(len(self.lines[word]), least)
        return self.lines[word]

    def same(self, got, wanted, case):
        if got != wanted:
            self.fail(f"{got} by the page, {wanted} by the library, for {case}")

    def test_constants(self):
        self.assertEqual({name: f"{bits_of(value):08x}" for name, value in CONSTANTS.items()},
                         dict(self.cases("constant", 11)))

    def test_rounding(self):
        for case in self.cases("round", 3000):
            u, bf16, f16, f = (int(word, 16) for word in case)
            self.same((round_bf16(u), round_f16(u), round_f32(u)), (bf16, f16, f), case)

    def test_exp(self):
        for case in self.cases("exp", 3000):
            x, wanted = numbers(",".join(case))
            self.same(bits_of(exp(f32(x))), wanted, case)

    def test_sigmoid(self):
        for case in self.cases("sigmoid", 3000):
            x, wanted = numbers(",".join(case))
            self.same(bits_of(sigmoid(f32(x))), wanted, case)

    def test_gated(self):
        for case in self.cases("gated", 1900):
            alpha, limit, offset, gate, up, wanted = (int(word, 16) for word in case)
            got = gated((f32(alpha), f32(limit), f32(offset)), f32(gate), f32(up))
            self.same(bits_of(got), wanted, case)

    def test_chains(self):
        for dtype, a, b, wanted in self.cases("chain", 700):
            got = chain([WIDEN[dtype](v) for v in numbers(a)], [WIDEN[dtype](v) for v in numbers(b)])
            self.same(bits_of(got), int(wanted, 16), (dtype, a, b))

    def test_layers(self):
        for case in self.cases("layer", 140):
            dtype, layout, gating, alpha, limit, offset, sizes, ids, weights, *tensors, y = case
            activation = tuple(f32(int(word, 16)) for word in (alpha, limit, offset))
            layer = Layer(dtype, [int(word) for word in sizes.split(",")], layout == "0", gating == "0", activation)
            layer.ids = [int(word) for word in ids.split(",")]
            layer.weights = [f32(v) for v in numbers(weights)]
            layer.x, layer.up, layer.down, layer.up_bias, layer.down_bias = (layer.wide(numbers(t)) for t in tensors)
            self.same(layer.forward()[3], numbers(y), case)

    def test_golden(self):
        rows = list(golden_rows())
        self.assertGreaterEqual(len(rows), 10)
        for row in rows:
            with self.subTest(case=row[0]):
                self.assertEqual(f"{golden(row):016x}", row[-1])


if __name__ == "__main__":
    house.main()
