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
        e = o = 0.0
        for i in range(0, len(at), 2):
            e = fma(at[i], bt[i], e)
            o = fma(at[i + 1], bt[i + 1], o) if i + 1 < len(at) else o
        if len(at) < 31:
            e = fma(0.0, 0.0, e)  # one absent term does what all of them do
        if len(at) < 32:
            o = fma(0.0, 0.0, o)
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


def gated_grad(activation, gate0, up0, da):
    alpha, limit, offset = activation
    gate = limit if gate0 > limit else gate0
    up = limit if up0 > limit else up0
    up = -limit if up < -limit else up
    if offset != 0:
        up = add(up, offset)
    z = mul(alpha, gate) if alpha != 1 else gate
    s = sigmoid(z)
    slope = mul(s, add(1.0, mul(z, add(1.0, -s))))
    d_gate = 0.0 if gate0 > limit else mul(mul(da, up), slope)
    d_up = 0.0 if up0 > limit or up0 < -limit else mul(da, mul(gate, s))
    return d_gate, d_up


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


# ---- 7. Backward

class Backward:
    """Of a Layer: dx, d_topk_weights, d_up_proj, d_down_proj and the biases' gradients, as stored, overwritten."""

    def __init__(self, layer):
        self.layer = layer
        self.rows = {e: [] for e in range(layer.E)}  # x, dH, a, wdy of each row, widened
        self.d_weights = [0.0] * (layer.T * layer.K)

    def column(self, matrix, expert, sizes, term, column):
        """The element (term, column) of the expert's [terms,columns] matrix, however it lies."""
        terms, columns = sizes
        at = term * columns + column if self.layer.kn else column * terms + term
        return matrix[expert * terms * columns + at]

    def slot(self, t, k):
        """The slot's dx, rounded and widened."""
        la = self.layer
        e, weight, H, I = la.ids[t * la.K + k], la.weights[t * la.K + k], la.H, la.I
        x, dy = (rows[t * H:(t + 1) * H] for rows in (la.x, la.dy))
        gate_up, a, _ = la.slot(x, e)
        gate_up, a = la.wide(gate_up), la.wide(a)
        da = [chain(dy, [self.column(la.down, e, (I, H), i, h) for h in range(H)]) for i in range(I)]
        v = chain(da, a)
        if la.down_bias is not None:
            v = add(v, chain(dy, la.down_bias[e * H:(e + 1) * H]))
        self.d_weights[t * la.K + k] = v
        dh = [0.0] * (2 * I)
        for i in range(I):
            gate, up = (i, I + i) if la.halves else (2 * i, 2 * i + 1)
            dh[gate], dh[up] = gated_grad(la.activation, gate_up[gate], gate_up[up], mul(da[i], weight))
        dh = la.wide([rounded(la.dtype, value) for value in dh])
        self.rows[e].append((x, dh, a, la.wide([rounded(la.dtype, mul(weight, value)) for value in dy])))
        return la.wide([rounded(la.dtype, chain(dh, [self.column(la.up, e, (H, 2 * I), h, c) for c in range(2 * I)]))
                        for h in range(H)])

    def weight(self, left, right, terms, columns):
        """The gradients of all experts' [terms,columns] matrices: sums over rows of left (x) right, as they lie."""
        out = []
        for e in range(self.layer.E):
            rows = self.rows[e]
            lefts = [[row[left][i] for row in rows] for i in range(terms)]
            rights = [[row[right][c] for row in rows] for c in range(columns)]
            pairs = [(i, c) for i in range(terms) for c in range(columns)] if self.layer.kn else \
                    [(i, c) for c in range(columns) for i in range(terms)]
            out += [rounded(self.layer.dtype, chain(lefts[i], rights[c])) for i, c in pairs]
        return out

    def bias(self, of, columns):
        return [rounded(self.layer.dtype, chain([row[of][c] for row in self.rows[e]], [1.0] * len(self.rows[e])))
                for e in range(self.layer.E) for c in range(columns)]

    def run(self):
        la, dx = self.layer, []
        for t in range(la.T):
            acc = [0.0] * la.H
            for k in range(la.K):
                if la.ids[t * la.K + k] != -1:
                    acc = [add(total, value) for total, value in zip(acc, self.slot(t, k))]
            dx += [rounded(la.dtype, total) for total in acc]
        out = [dx, self.weight(0, 1, la.H, 2 * la.I), self.weight(2, 3, la.I, la.H)]
        if la.up_bias is not None:
            out += [self.bias(1, 2 * la.I), self.bias(3, la.H)]
        return out, [rounded("f32", v) for v in self.d_weights]


# ---- 11. Golden checks

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


def checksum(dtype, tensors, value=0xCBF29CE484222325):
    form = "<I" if dtype == "f32" else "<H"
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
    layer.dy = draws.tensor(dtype, 4 * 70, 1.0)
    return layer


def golden_backward(layer):
    (dx, *rest), d_weights = Backward(layer).run()
    return checksum(layer.dtype, rest, checksum("f32", [d_weights], checksum(layer.dtype, [dx])))


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
                layer = golden(row)
                self.assertEqual(f"{checksum(layer.dtype, layer.forward()):016x}", row[-1])

    def test_golden_backward(self):
        wanted = dict(re.findall(r"^\| (\S+) \| `([0-9a-f]{16})` \|$", PAGE, re.MULTILINE))
        rows = list(golden_rows())
        self.assertEqual(len(wanted.keys() & {row[0] for row in rows}), len(rows))
        for row in rows:
            with self.subTest(case=row[0]):
                self.assertEqual(f"{golden_backward(golden(row)):016x}", wanted[row[0]])


if __name__ == "__main__":
    house.main()
