"""The hmoe command as a stranger meets it: help, errors, and every command once on something small."""

import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

import house
from house import SOURCE

HMOE = house.BUILD / "hmoe"
COMMANDS = ("run", "train", "check", "bench", "doctor", "knobs")
SMALL = ("--hidden", "96", "--inner", "40", "--experts", "8", "--topk", "3", "--tokens", "40")


def hmoe(*words, folder=SOURCE, **options):
    """Exit status, standard output, standard error."""
    done = subprocess.run([str(HMOE), *map(str, words)], text=True, capture_output=True, cwd=folder, timeout=250,
                          **options)
    return done.returncode, done.stdout, done.stderr


def fine(*words, **options):
    status, out, error = hmoe(*words, **options)
    if status != 0:
        raise AssertionError(f"hmoe {' '.join(map(str, words))}\nexit status {status}\n{out}{error}")
    return out


def present_engines():
    return re.findall(r"^  (\w+) +present ", fine("doctor"), re.M)


class Help(house.TestCase):
    def assert_narrow(self, text):
        for line in text.splitlines():
            self.assertLessEqual(len(line), 80, line)

    def test_overview(self):
        out = fine("--help")
        self.assert_narrow(out)
        for name in COMMANDS:
            self.assertRegex(out, rf"(?m)^  {name} ")
        self.assertEqual(hmoe()[0], 2)

    def test_each_command(self):
        for name in COMMANDS:
            with self.subTest(command=name):
                out = fine(name, "--help")
                self.assert_narrow(out)
                self.assertTrue(out.startswith(f"Usage: hmoe {name}"))
                self.assertEqual(out, fine(name, "-h"))

    def test_options_of_the_issue(self):
        wanted = {
            "run": "ranks via workers model hidden inner experts topk tokens dtype layout engine knobs seed trace",
            "train": "ranks via workers steps minutes layers width heads experts topk inner save resume sample",
            "check": "seconds seed engine stages backward",
            "bench": "all backward json tokens layout engine routing ranks workers reps model",
        }
        for name, options in wanted.items():
            out = fine(name, "--help")
            for option in options.split():
                self.assertRegex(out, rf"(?m)^  --{option}\b", name)

    def test_version(self):
        version = re.search(r'#define HMOE_VERSION "(.*)"', (SOURCE / "include/hmoe.h").read_text()).group(1)
        self.assertEqual(fine("--version"), f"hmoe {version}\n")

    def test_knobs_are_the_one_list(self):
        out = fine("knobs")
        self.assert_narrow(out)
        names = re.findall(r'^X\(\w+, "(\w+)"', (SOURCE / "src/base/knobs.def").read_text(), re.M)
        self.assertGreater(len(names), 10)
        self.assertEqual(re.findall(r"^(\w+)  \[", out, re.M), names)


class Errors(house.TestCase):
    def assert_usage(self, words, *wanted):
        """Exit status 2, nothing on standard output, and a text that names all of `wanted`."""
        status, out, error = hmoe(*words)
        self.assertEqual((status, out), (2, ""), f"{words}: {error}")
        for text in wanted:
            self.assertIn(text, error, words)

    def test_numbers(self):
        for bad in ("12x", "", "x", "1.5", "0x10", " 3", "--help"):
            self.assert_usage(["run", "--tokens", bad], "--tokens", bad, "1 to 16777216")
        for bad in ("0", "-1", "16777217", "99999999999999999999", "-99999999999999999999"):
            self.assert_usage(["run", "--tokens", bad], "--tokens", bad, "out of range", "1 to 16777216")
        for bad in ("1,,2", "1,", ",", "0", "1,x"):
            self.assert_usage(["bench", "--tokens", bad], "--tokens", "1 to 1048576")

    def test_words(self):
        self.assert_usage(["frob"], "frob", "run, train, check, bench, doctor, knobs")
        self.assert_usage(["run", "--frob"], "--frob")
        self.assert_usage(["run", "-z"], "-z")
        self.assert_usage(["run", "--tokens"], "--tokens needs a value")
        self.assert_usage(["run", "--dtype", "f64"], "--dtype", "f64", "f32|bf16|f16")
        self.assert_usage(["run", "--model", "GPT-9"], "GPT-9", "OLMoE")
        self.assert_usage(["run", "--engine", "gpu"], "gpu", "avx512")
        self.assert_usage(["bench", "--layout", "kn,xx"], "kn,xx", "kn|nk")
        self.assert_usage(["run", "--knobs", "wave=maybe"], "wave", "maybe", "off|on")
        self.assert_usage(["run", "--knobs", "frob=1"], "frob")
        for name in ("check", "bench", "doctor", "knobs"):
            self.assert_usage([name, "stray"], "stray")

    def test_shapes(self):
        self.assert_usage(["run", "--experts", "6", "--ranks", "4"], "--experts 6", "--ranks 4", "4 and 8")
        self.assert_usage(["run", "--experts", "2", "--ranks", "4"], "4 and 8")
        self.assert_usage(["run", "--topk", "9", "--experts", "8"], "--topk 9", "--experts 8")
        self.assert_usage(["bench", "--ranks", "3"], "--ranks 3", "128")

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            (place / "empty").touch()
            self.assert_usage(["run", place / "missing"], "missing", "No such file")
            self.assert_usage(["run", place / "empty"], "empty")
            self.assert_usage(["run", place], folder, "directory")
            self.assert_usage(["run", "--trace", place / "no/trace"], "--trace", "no/trace")
            self.assert_usage(["run", "--trace", place], "--trace", "directory")
            self.assert_usage(["bench", "--json", place / "no/lines"], "--json", "no/lines")

    def test_an_engine_that_is_not_here(self):
        here = present_engines()
        self.assertIn("scalar", here)
        missing = [name for name in ("amx", "avx512", "avx2", "neon") if name not in here]
        self.assertGreater(len(missing), 0, "no machine has them all")
        for name in missing:
            self.assert_usage(["run", "--engine", name], name)
            self.assert_usage(["check", "--engine", name], name)
            self.assert_usage(["bench", "--engine", name], name)

    def test_too_large_is_refused_with_its_bytes(self):
        status, out, error = hmoe("run", "--experts", 65536, "--hidden", 8192, "--inner", 8192)
        self.assertEqual((status, out), (1, ""))
        self.assertRegex(error, r"needs 26\.4 TB \(weights 26\.4 TB")
        fit = int(re.search(r"Try --experts (\d+)", error).group(1))
        self.assertTrue(8 <= fit < 65536 and fit % 2 == 0, fit)
        status, out, error = hmoe("run", "--hidden", 1 << 20, "--inner", 1 << 20)
        self.assertEqual((status, out), (1, ""))
        self.assertIn("Try smaller --hidden", error)

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([str(HMOE), "knobs"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn("standard output", done.stderr)

    def test_a_bad_environment_is_named(self):
        for words in (("run",), ("check", "--seconds", 0), ("bench", "--tokens", 1)):
            status, _, error = hmoe(*words, env={"HMOE_WAVE": "sideways"})
            self.assertEqual(status, 2)
            for text in ("environment", "wave", "sideways"):
                self.assertIn(text, error)

    def test_json_that_does_not_fit(self):
        status, _, error = hmoe("bench", "--json", "/dev/full", "--tokens", 1, "--experts", 8, "--reps", 1,
                                "--layout", "kn", "--engine", "scalar")
        self.assertEqual(status, 1)
        self.assertIn("/dev/full", error)


def checksum(out):
    return re.search(r"Checksum of y: ([0-9a-f]{16})", out).group(1)


def checked(out):
    """Tokens compared with the oracle, of all."""
    found = re.search(r"Checked: ([\d,]+) of ([\d,]+) tokens equal the oracle", out)
    return tuple(int(number.replace(",", "")) for number in found.groups())


class Run(house.TestCase):
    def test_a_report_has_everything(self):
        out = fine("run", *SMALL, "--ranks", 2, "README.md")
        for line in out.splitlines():
            self.assertLessEqual(len(line), 80, line)
        for text in ("README.md: 40 of its", "2 threads with", "Expert load: 120 rows", "first call", "steady state",
                     "overlap", "P50", "P99", "Memory beside your tensors"):
            self.assertIn(text, out)
        for stage in ("route", "permute", "dispatch", "gmm1", "swiglu", "gmm2", "combine"):
            self.assertRegex(out, rf"(?m)^  {stage} +[\d.]+ [mu]?s")
        self.assertEqual(checked(out), (40, 40))

    def test_ranks_ways_and_engines_give_the_same_bits(self):
        sums = {}
        for engine in ("auto", *present_engines()):
            for ranks, via in ((1, "threads"), (2, "processes"), (4, "threads"), (4, "processes")):
                out = fine("run", *SMALL, "--engine", engine, "--ranks", ranks, "--via", via, "README.md")
                self.assertEqual(checked(out), (40, 40))
                sums[engine, ranks, via] = checksum(out)
        self.assertEqual(len(set(sums.values())), 1, sums)
        self.assertNotEqual(checksum(fine("run", *SMALL, "--seed", 2, "README.md")), *set(sums.values()))

    def test_expert_load_adds_up(self):
        out = fine("run", *SMALL)
        loads = [int(rows) for rows in re.findall(r"^  expert \d+ +(\d+) ", out, re.M)]
        self.assertEqual((len(loads), sum(loads)), (8, 120))
        received = re.findall(r"^  rank (\d+) +(\d+) +(\d+) ", out, re.M)
        self.assertEqual([rank for rank, _, _ in received], ["0", "1"])
        self.assertEqual(sum(int(tokens) for _, tokens, _ in received), 40)
        self.assertEqual(sum(int(rows) for _, _, rows in received), 120)

    def test_a_rank_may_have_no_tokens(self):
        for via in ("threads", "processes"):
            out = fine("run", "--hidden", 64, "--inner", 32, "--experts", 8, "--topk", 2, "--tokens", 3, "--ranks", 8,
                       "--via", via)
            self.assertEqual(checked(out), (3, 3))
            self.assertRegex(out, r"(?m)^  rank \d +0 ")

    def test_dtypes_and_layouts(self):
        for dtype in ("f32", "bf16", "f16"):
            for layout in ("kn", "nk"):
                out = fine("run", *SMALL, "--dtype", dtype, "--layout", layout)
                self.assertIn(f"{dtype}, weights {layout}", out)
                self.assertEqual(checked(out), (40, 40))

    def test_a_model_and_what_changes_it(self):
        out = fine("run", "--model", "gpt-oss-20b", "--experts", 4, "--topk", 2, "--hidden", 720, "--tokens", 6)
        self.assertIn("gpt-oss-20b: H 720, I 2880, E 4, K 2", out)
        self.assertIn("clamped, biased", out)
        self.assertEqual(checked(out)[1], 6)
        self.assertGreaterEqual(checked(out)[0], 2, "each rank's tokens are sampled")

    def test_it_works_from_anywhere(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertIn("this program's own help", fine("run", *SMALL, folder=folder))
        self.assertRegex(fine("run", *SMALL), r"README.md and \d+ more files: 40 of its [\d,]+ tokens")

    def test_any_bytes_are_text(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "binary"
            path.write_bytes(bytes(range(256)))
            out = fine("run", *SMALL[:-1], 4000, path)
            self.assertRegex(out, r"its \d+ tokens, again and again, 4,000 in all")

    def test_trace(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.json"
            for via, ranks in (("threads", 1), ("threads", 3), ("processes", 3)):
                fine("run", *SMALL[:-6], "--experts", 9, "--topk", 3, "--tokens", 40, "--trace", path, "--via", via,
                     "--ranks", ranks)
                events = json.loads(path.read_text())["traceEvents"]
                self.assertEqual({event["pid"] for event in events}, set(range(ranks)))
                self.assertLessEqual({"route", "gmm1", "gmm2", "combine"}, {event["name"] for event in events})
                self.assertEqual([file.name for file in path.parent.iterdir()], ["trace.json"])


def children(parent):
    """Processes of this parent."""
    found = []
    for place in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(place.parent.name))
    return found


class Check(house.TestCase):
    def test_a_second(self):
        out = fine("check", "--seconds", 2, "--seed", 1)
        cases = int(re.search(r"^([\d,]+) cases?, all equal", out, re.M).group(1).replace(",", ""))
        self.assertGreater(cases, 7, "one of every routing")
        for engine in present_engines():
            self.assertGreater(int(re.search(rf"{engine} (\d+) calls", out).group(1)), 0)
        for routing in ("uniform", "log-normal", "one hot", "two hot", "alike", "masked", "duplicates", "nothing"):
            self.assertGreater(int(re.search(rf"{routing} (\d+)", out).group(1)), 0, routing)

    def test_one_case_again(self):
        first = fine("check", "--seconds", 0, "--seed", 77, "--engine", "scalar")
        self.assertEqual(first, fine("check", "--seconds", 0, "--seed", 77, "--engine", "scalar"))
        self.assertIn("1 case, all equal", first)

    def test_a_crash_says_how_to_repeat_it(self):
        with subprocess.Popen([str(HMOE), "check", "--seconds", "60", "--seed", "5", "--engine", "scalar"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            self.assertIn("from seed 5", process.stdout.readline())
            time.sleep(0.5)
            for child in children(process.pid):
                os.kill(child, signal.SIGSEGV)
            error = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 1)
        self.assertRegex(error, r"CRASHED with engine scalar: killed by signal 11")
        self.assertRegex(error, r"again +hmoe check --seconds 0 --seed \d+\n")

    def test_stages(self):
        self.assertIn("stage by stage", fine("check", "--seconds", 1, "--seed", 1, "--stages"))


    def test_backward(self):
        out = fine("check", "--backward", "--seconds", 1, "--seed", 11)
        self.assertIn("all equal to the oracle bit for bit, forward and backward", out)
        status, _, error = hmoe("check", "--backward", "--stages")
        self.assertEqual(status, 2)
        self.assertIn("one of them at a time", error)


class Train(house.TestCase):
    TINY = ("--layers", 1, "--width", 16, "--heads", 2, "--experts", 4, "--topk", 2, "--inner", 8, "--context", 16,
            "--batch", 4, "--sample", 20)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def train(self, *words):
        """Standard output, and the objects of --json."""
        path = self.folder / "lines.json"
        out = fine("train", *self.TINY, *words, "--json", path)
        return out, [json.loads(line) for line in path.read_text().splitlines()]

    def test_ranks_give_the_same_losses_and_checkpoints(self):
        files, last = [], []
        for ranks, via in ((1, "threads"), (2, "threads"), (4, "processes")):
            path = self.folder / f"{ranks}.safetensors"
            out, lines = self.train("--steps", 12, "--ranks", ranks, "--via", via, "--save", path)
            self.assertIn("Held-back loss", out)
            files.append(path.read_bytes())
            last.append((lines[-1]["step"], lines[-1]["loss"], lines[-1]["validation_loss"]))
        self.assertEqual(len(set(files)), 1)
        self.assertEqual(len(set(last)), 1)
        self.assertEqual(last[0][0], 12)
        self.assertLess(last[0][2], 5.6)

    def test_the_lines_and_the_timeline(self):
        trace = self.folder / "trace.json"
        out, lines = self.train("--steps", 6, "--ranks", 2, "--trace", trace)
        for word in ("step ", "loss", "held back", "byte/s", "exposed", "expert   3", "dweight", "|"):
            self.assertIn(word, out)
        for line in out.splitlines():
            self.assertLessEqual(len(line), 80, line)
        wanted = {"step", "loss", "validation_loss", "tokens_per_s", "balance", "exposed", "seconds"}
        self.assertLessEqual(wanted, lines[-1].keys())
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        self.assertLessEqual({"gmm1", "gmm2", "dact", "dgmm", "dweight", "combine"}, names)

    def test_a_checkpoint_is_a_safetensors_file(self):
        path = self.folder / "model.safetensors"
        self.train("--steps", 2, "--save", path)
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        self.assertEqual(header.pop("__metadata__")["step"], "2")
        end = 0
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = tensor["data_offsets"]
            count = 1
            for size in tensor["shape"]:
                count *= size
            self.assertEqual((tensor["dtype"], first, last - first), ("F32", end, 4 * count), name)
            end = last
        self.assertEqual(len(data), 8 + length + end)
        out, lines = self.train("--resume", path, "--steps", 4)
        self.assertIn("at step 2", out)
        self.assertEqual(lines[-1]["step"], 4)

    def test_what_is_refused(self):
        short = self.folder / "short.txt"
        short.write_text("not much")
        model = self.folder / "model.safetensors"
        self.train("--steps", 1, "--save", model)
        for words, hints in (
                (["--ranks", 3], ["ranks 3", "1, 2 or 4"]), (["--batch", 6], ["batch 6", "multiple of 4"]),
                (["--width", 18], ["width 18"]), (["--topk", 9], ["topk 9"]), (["--rate", "fast"], ["--rate fast"]),
                ([short], ["short.txt has 8 bytes"]), (["--resume", short], ["short.txt"]),
                (["--resume", model, "--width", 32], ["--width 32", "made with 16"]),
                (["--resume", model, "--steps", 1], ["--steps 1", "done 1 already"]),
                (["--steps", 1, "--minutes", 1], ["one of them at a time"]),
                (["--save", self.folder / "no" / "where"], ["--save", "cannot be written"])):
            with self.subTest(words=words):
                status, _, error = hmoe("train", *words)
                self.assertEqual(status, 2, error)
                for hint in hints:
                    self.assertIn(hint, error)


class Bench(house.TestCase):
    def test_backward_lines(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "bench.json"
            out = fine("bench", "--backward", "--experts", 8, "--tokens", 4, "--layout", "nk", "--reps", 1, "--json",
                       path)
            lines = [json.loads(line) for line in path.read_text().splitlines() if '"backward"' in line]
        self.assertIn("Backward, fused against bulk", out)
        self.assertEqual([(line["dw_dtype"], line["dw_mode"]) for line in lines],
                         [("bf16", "overwrite"), ("f32", "accumulate")])
        for line in lines:
            self.assertGreater(line["ms_median"], 0)
            self.assertGreater(line["dw_bytes"], 0)
            self.assertGreater(line["checked"], 0)

    def test_lines(self):
        """One quick case: 16 of the experts, several layers of them in rotation."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "lines"
            status, out, error = hmoe("bench", "--experts", 16, "--tokens", "1,3", "--layout", "nk", "--engine", "auto",
                                      "--reps", 3, "--json", path)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertTrue(status == 0 or "faster than the limits" in out, out + error)
        for line in out.splitlines():
            self.assertLessEqual(len(line), 100, line)
        self.assertEqual([line["bench"] for line in lines], ["limits", "forward", "forward"])
        self.assertLessEqual({"amx_gflops", "fma_gflops", "read_gbs", "store_gbs", "workers"}, lines[0].keys())
        self.assertGreater(lines[0]["read_gbs"], 0)
        for line, tokens in zip(lines[1:], (1, 3)):
            self.assertLessEqual({"shape", "tokens", "dtype", "layout", "routing", "ranks", "workers", "engine",
                                  "ms_first", "ms_median", "ms_bulk", "ms_floor", "floor_fraction"}, line.keys())
            self.assertEqual((line["tokens"], line["dtype"], line["layout"], line["routing"], line["ranks"]),
                             (tokens, "bf16", "nk", "uniform", 1))
            self.assertIn(line["engine"], present_engines())
            self.assertAlmostEqual(line["floor_fraction"], line["ms_floor"] / line["ms_median"], places=4)
            self.assertEqual((line["pairs"], line["checked"] >= 4), (3, True))


class Doctor(house.TestCase):
    def test_report(self):
        out = fine("doctor")
        for line in out.splitlines():
            self.assertLessEqual(len(line), 80, line)
        for text in ("CPUs ", "caches", "Engines", "2 MB pages", "Transports", "wait limit", "open files"):
            self.assertIn(text, out)
        for name in ("shm", "threads"):
            self.assertRegex(out, rf"(?m)^  {name} +works")
        self.assertEqual(len(re.findall(r"^  (?:f32|bf16|f16) +(?:kn|nk)  \w+", out, re.M)), 6)

    def test_a_bad_environment_is_found(self):
        status, out, _ = hmoe("doctor", env={"HMOE_ENGINE": "steam"})
        self.assertEqual(status, 0)
        self.assertRegex(out, r"(?s)steam.*  ! ")


if __name__ == "__main__":
    house.main()
