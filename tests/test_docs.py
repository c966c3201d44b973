"""The documents describe what works: their C compiles, the commands and files that they name exist."""

import ast
import re
import shlex
import tempfile
import pathlib

import house
from house import SOURCE, files, shown

PRELUDE = "#include <hmoe.h>\n#include <math.h>\n#include <stdint.h>\n#include <stdio.h>\n" \
          "#include <stdlib.h>\n#include <string.h>\n"
TOP_LEVEL = PRELUDE + "{0}\n"
IN_FUNCTION = PRELUDE + "int fragment(void);\nint fragment(void)\n{{\n{0}\nreturn 0;\n}}\n"


def documents():
    return files("*.md", "docs/**/*.md", "src/**/*.md")


def blocks(path, language):
    """(line, text) of each fenced block of this language."""
    text = path.read_text()
    for match in re.finditer(r"^```" + language + r"\n(.*?)^```", text, re.M | re.S):
        yield text.count("\n", 0, match.start()) + 1, match.group(1)


def compiles(text):
    """None, or what the compiler said."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "block.c"
        path.write_text(text)
        try:
            house.run(house.cached("CMAKE_C_COMPILER"), "-std=gnu11", "-Wall", "-Wno-unused", "-Werror", "-fsyntax-only",
                      "-I", SOURCE / "include", "-I", SOURCE / "src", path)
        except AssertionError as error:
            return str(error)
    return None


class Code(house.TestCase):
    def check(self, path, line, earlier, text):
        """A block is a file, goes on from the blocks before it, or is the inside of a function."""
        errors = [compiles(form.format(code)) for form, code in
                  ((TOP_LEVEL, text), (TOP_LEVEL, earlier + text), (IN_FUNCTION, text))]
        self.assertIn(None, errors, f"{shown(path)}:{line} does not compile:\n{errors[0]}")

    def test_c_blocks(self):
        count = 0
        for path in documents():
            earlier = ""
            for line, text in blocks(path, "c"):
                with self.subTest(path=shown(path), line=line):
                    self.check(path, line, earlier, text)
                earlier += text
                count += 1
        self.assertGreater(count, 0)

    def test_python_blocks(self):
        count = 0
        for path in documents():
            for line, text in blocks(path, "python"):
                with self.subTest(path=shown(path), line=line):
                    ast.parse(text)
                    count += 1
        self.assertGreater(count, 3)

    def test_the_check_itself(self):
        self.assertIsNotNone(compiles(TOP_LEVEL.format("int f(void) { return hmoe_nothing(); }")))


class Commands(house.TestCase):
    def exists(self, command):
        words = shlex.split(command, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if not words:
            return
        path = pathlib.Path(words[0])
        if path.parts[0] == "build" and path.name == "hmoe":
            self.assertIn(words[1], self.help, f"hmoe has no `{words[1]}`")
            self.options_exist(words)
        elif words[0] == "pip":
            extra = re.fullmatch(r"\.\[(\w+)\]", words[-1])
            self.assertTrue(extra and re.search(rf"^{extra[1]} = ", (SOURCE / "pyproject.toml").read_text(), re.M), words)
        elif words[0] in ("python", "torchrun"):
            script = next(word for word in words if word.endswith(".py"))
            self.assertTrue((SOURCE / script).exists(), script)
        elif "/" in words[0]:
            self.assertTrue((SOURCE / path).exists(), words[0])
        else:
            self.assertIn(words[0], ("cmake", "ctest", "cd", "export", "git", "cc", "gcc", "pkg-config", "python3", "ninja"))

    def options_exist(self, words):
        if words[1].startswith("-"):
            return
        text = house.run(house.BUILD / "hmoe", words[1], "--help")
        for word in words[2:]:
            if word.startswith("--"):
                self.assertIn(word.split("=")[0], text, f"hmoe {words[1]} has no {word}")

    def test_shell_blocks(self):
        self.help = house.run(house.BUILD / "hmoe", "--help")
        count = 0
        for path in documents():
            for line, text in blocks(path, "sh"):
                for command in re.split(r"\n|&&|\|", text.replace("\\\n", " ")):
                    with self.subTest(path=shown(path), line=line, command=command):
                        self.exists(command)
                        count += 1
        self.assertGreater(count, 3)


class Links(house.TestCase):
    def test_links_lead_somewhere(self):
        for path in documents():
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
                if "://" not in target:
                    self.assertTrue((path.parent / target).exists(), f"{shown(path)} links to {target}")

    def test_named_files_exist(self):
        """A file named in backquotes with its folder is in the tree; x stands for a name of the reader's own."""
        roots = "src|include|cli|examples|tests|tools|docs|bench|cmake"
        for path in documents():
            for name in re.findall(rf"`((?:{roots})/[\w./-]+\w)`", path.read_text()):
                if not re.search(r"\bx\.c|_x\.c", name):
                    self.assertTrue((SOURCE / name).exists(), f"{shown(path)} names {name}")

    def test_every_room_has_its_page(self):
        for room in (path for path in (SOURCE / "src").iterdir() if path.is_dir()):
            with self.subTest(room=room.name):
                self.assertTrue((room / "README.md").is_file())


if __name__ == "__main__":
    house.main()
