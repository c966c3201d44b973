"""The house rules that a script can hold: DESIGN's rooms and arrows, lengths, one list of knobs, no hidden state."""

import re
import socket
import tempfile
import pathlib

import c_scan
import house
from house import SOURCE, files, shown

# Who may include whom. hmoe.h is everybody's.
ARROWS = {
    "base": "",
    "trace": "base",
    "kern": "base",
    "comm": "base trace",
    "rt": "base trace comm",
    "ref": "base",
    "moe": "rt kern comm trace base",
    "api": "base trace kern comm rt ref moe",
    "model": "moe comm kern base",
    "aclnn": "",
}

C_FILES = ("src/**/*.[ch]", "include/*.h", "cli/*.[ch]", "examples/*.c", "bench/*.[ch]", "tests/**/*.[ch]")

# Objects with writable variables, and why.
STATE = {
    "src/kern/amx_emulated.c": "the tiles of the emulated matrix unit, which are a thread's registers",
    "src/aclnn/globals.c": "a thread's recent error text, and the groups by name that ACLNN's calls look up",
    "src/api/report.c": "a thread's latest error text, which hmoe_last_error() returns",
}


def room_of(path):
    parts = path.relative_to(SOURCE).parts
    return parts[1] if parts[0] == "src" else parts[0]


def includes(path):
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)


def included_file(path, name):
    """The file that `#include "name"` means in `path`, or None."""
    for folder in (path.parent, SOURCE / "include", SOURCE / "src"):
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


class Rooms(house.TestCase):
    def test_every_room_has_its_arrows(self):
        rooms = {path.name for path in (SOURCE / "src").iterdir() if path.is_dir()}
        self.assertEqual(rooms, set(ARROWS))

    def test_includes_point_down(self):
        wrong = []
        for path in files("src/**/*.[ch]", "src/**/*.def"):
            allowed = {room_of(path), "include", *ARROWS[room_of(path)].split()}
            for name in includes(path):
                target = included_file(path, name)
                if target is None or room_of(target) not in allowed:
                    wrong.append(f"{shown(path)} includes {name}")
        self.assertEqual(wrong, [])

    def test_kern_and_moe_exist_in_the_arrows(self):
        """The two pairs that must not know each other, said again so that an edit of the table is noticed."""
        self.assertNotIn("comm", ARROWS["kern"].split())
        self.assertNotIn("kern", ARROWS["comm"].split())

    def test_examples_know_the_public_header_only(self):
        allowed = {"hmoe.h", "aclnn_hyper_mega_moe.h"}
        for path in files("examples/*.c"):
            quoted = set(includes(path))
            self.assertLessEqual(quoted, allowed, shown(path))
            self.assertIn("<hmoe.h>", path.read_text(), shown(path))


class Lengths(house.TestCase):
    def test_functions(self):
        found = [(lines, name, shown(path)) for path in files(*C_FILES)
                 for name, _, lines in c_scan.functions(path.read_text())]
        found.sort(reverse=True)
        longest = "\n".join(f"{lines:5} {name} {path}" for lines, name, path in found[:12])
        over_40 = sum(lines > 40 for lines, _, _ in found)
        over_70 = sum(lines > 70 for lines, _, _ in found)
        print(f"{len(found)} functions, {over_40} over 40 lines, {over_70} over 70; the longest:\n{longest}")
        self.assertGreater(len(found), 20, "the scanner finds no functions")
        self.assertLessEqual(over_40 * 10, len(found), f"more than 10 % over 40 lines:\n{longest}")
        self.assertLess(over_70 * 100, len(found), f"1 % or more over 70 lines:\n{longest}")

    def test_files(self):
        for path in files(*C_FILES, "tests/*.py", "tools/*", "bench/*.py", "**/*.cmake"):
            with self.subTest(path=shown(path)):
                self.assertLess(len(path.read_text().splitlines()), 600)

    def test_lines(self):
        wrong = [f"{shown(path)}:{number}" for path in files(*C_FILES)
                 for number, line in enumerate(path.read_text().splitlines(), 1)
                 if len(line) > 120 or "\t" in line or line != line.rstrip()]
        self.assertEqual(wrong, [], "over 120 columns, a tab, or blanks at the end")

    def test_the_scanner_itself(self):
        text = 'extern "C" {\nint a(void)\n{\n  if (1) { "}"; }\n}\n}\nstruct s { int x; };\n' \
               "static int t[] = {1, 2};\n/* } */\nint\nb(int (*f)(int),\n  int c)\n{\n}\n"
        self.assertEqual(c_scan.functions(text), [("a", 2, 4), ("b", 10, 5)])


class Habits(house.TestCase):
    def test_nothing_is_left_for_later(self):
        words = re.compile(r"\b(?:TO" + "DO|FIX" + r"ME|HA" + r"CK)\b")
        for path in files("**/*"):
            match = words.search(path.read_text(errors="replace"))
            self.assertIsNone(match, shown(path))

    def test_include_guards(self):
        guards = {}
        for path in files("src/**/*.h", "include/*.h", "cli/*.h", "bench/*.h", "tests/**/*.h"):
            directives = re.findall(r"^#[ \t]*(\w+)[ \t]*(\S*)", c_scan.code_only(path.read_text()), re.M)
            with self.subTest(path=shown(path)):
                self.assertGreater(len(directives), 2)
                self.assertEqual([word for word, _ in directives[:2]], ["ifndef", "define"])
                self.assertEqual(directives[0][1], directives[1][1])
                self.assertEqual(directives[-1][0], "endif")
                self.assertNotIn(directives[0][1], guards, "the same guard as another header")
                guards[directives[0][1]] = path

    def test_the_environment_is_read_in_one_place(self):
        for path in files("src/**/*.[ch]", "cli/*.[ch]", "bench/*.[ch]", "examples/*.c"):
            reads = re.search(r"\b(secure_)?getenv\b|\benviron\b", c_scan.code_only(path.read_text()))
            if shown(path) != "src/base/knobs.c":
                self.assertIsNone(reads, f"{shown(path)} reads the environment; knobs.def is the place")

    def test_no_machine_is_named(self):
        places = ["/" + folder + "/" for folder in ("home", "work", "root", "Users")]
        host = socket.gethostname()
        for path in files("**/*"):
            text = path.read_text(errors="replace")
            for place in places:
                self.assertNotIn(place, text, shown(path))
            if len(host) > 8:
                self.assertNotIn(host, text, shown(path))


def writable(object_file):
    """The variables of an object that a program can change: (section, name)."""
    found = []
    for line in house.run(house.cached("CMAKE_OBJDUMP"), "-t", object_file).splitlines():
        match = re.match(r"^\S+ .{7} (\S+)\t\S+ +(?:\.hidden )?(\S+)$", line)
        if match is None or match.group(1) == match.group(2):
            continue
        if re.match(r"\.(data|bss|tdata|tbss)(?!\.rel\.ro)|\*COM\*", match.group(1)):
            found.append((match.group(1), match.group(2)))
    return found


class State(house.TestCase):
    def test_no_mutable_globals(self):
        objects = sorted((house.BUILD / "CMakeFiles/hmoe_objects.dir/src").rglob("*.o"))
        self.assertGreater(len(objects), 5, "the release objects are not where CMake puts them")
        for path in objects:
            source = "src/" + str(path.relative_to(house.BUILD / "CMakeFiles/hmoe_objects.dir/src"))[:-2]
            if source not in STATE:
                self.assertEqual(writable(path), [], f"{source} has variables that outlive a call")

    def test_every_exception_exists(self):
        for source in STATE:
            self.assertTrue((SOURCE / source).is_file(), source)

    def test_the_check_sees_each_kind(self):
        text = "static int a; int b = 1; _Thread_local int c; _Thread_local int d = 2; int e;\n" \
               "const int f = 3; const char *const g[] = {\"x\"};\n" \
               "int h(void) { static int i; return i++ + a++ + b + c + d + e; }\n"
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            (place / "state.c").write_text(text)
            house.run(house.cached("CMAKE_C_COMPILER"), "-fPIC", "-c", place / "state.c", "-o", place / "state.o")
            # gcc calls a function's own variable i.0, clang h.i
            names = {part for _, name in writable(place / "state.o") for part in name.split(".") if part.isalpha()}
        self.assertEqual(names - {"h"}, {"a", "b", "c", "d", "e", "i"})


if __name__ == "__main__":
    house.main()
