"""Only hmoe_* may be seen from outside, in the shared and in the static library, and all of hmoe.h must be."""

import re

import house

PUBLIC = re.compile(r"hmoe_\w+$")


def defined(library, *options):
    """The names that a library defines for others."""
    lines = house.run(house.cached("CMAKE_NM"), *options, "--defined-only", library).splitlines()
    words = [line.split() for line in lines if len(line.split()) == 3]
    return {name for _, kind, name in words if kind.isupper()}


def declared():
    text = re.sub(r"/\*.*?\*/", "", (house.SOURCE / "include/hmoe.h").read_text(), flags=re.S)
    return set(re.findall(r"HMOE_API[^;(]*?\b(hmoe_\w+)\(", text))


class Symbols(house.TestCase):
    def check(self, names):
        self.assertGreater(len(declared()), 20)
        self.assertEqual([name for name in sorted(names) if not PUBLIC.match(name)], [])
        self.assertEqual(names, declared())

    def test_shared(self):
        self.check(defined(house.BUILD / "libhmoe.so", "-D"))

    def test_aclnn(self):
        text = re.sub(r"/\*.*?\*/", "", (house.SOURCE / "include/aclnn_hyper_mega_moe.h").read_text(), flags=re.S)
        promised = set(re.findall(r"HMOE_API[^;(]*?\b(acl\w+)\(", text))
        self.assertGreater(len(promised), 20)
        self.assertEqual(defined(house.BUILD / "libhmoe_aclnn.so", "-D"), promised)

    def test_static(self):
        self.check(defined(house.BUILD / "libhmoe.a", "-g"))


if __name__ == "__main__":
    house.main()
