"""Installs to a prefix of its own (with a blank in its name), then builds example 01 against it in each way that
README promises, and runs it."""

import os
import pathlib
import shlex
import subprocess
import tempfile

import house

PROJECT = """cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES C)
find_package(hmoe 0.1 REQUIRED)
add_executable(with_shared {example})
target_link_libraries(with_shared PRIVATE hmoe::hmoe m)
add_executable(with_static {example})
target_link_libraries(with_static PRIVATE hmoe::hmoe_static)
"""


class Install(house.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.place = pathlib.Path(cls.folder.name) / "a prefix"
        cls.place.mkdir()
        house.run("cmake", "--install", house.BUILD, "--prefix", cls.place)
        cls.lib = next(cls.place.rglob("libhmoe.a")).parent
        cls.example = house.SOURCE / "examples/01_one_rank.c"
        cls.compiler = house.cached("CMAKE_C_COMPILER")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def flags(self, *options, package="hmoe"):
        environment = dict(os.environ, PKG_CONFIG_PATH=str(self.lib / "pkgconfig"))
        return shlex.split(house.run("pkg-config", *options, package, env=environment))

    def build(self, name, *flags, example=None):
        program = self.place / name
        house.run(self.compiler, "-Wall", "-Werror", example or self.example, "-o", program, *flags)
        return program

    def works(self, program, libraries=None, says="largest difference"):
        """Runs it; `libraries` is where the loader finds libhmoe.so."""
        environment = dict(os.environ)
        environment.pop("LD_LIBRARY_PATH", None)
        if libraries:
            environment["LD_LIBRARY_PATH"] = str(libraries)
        self.assertIn(says, house.run(program, env=environment))

    def test_what_lies_there(self):
        names = {path.name for path in self.place.rglob("*")}
        self.assertLessEqual({"hmoe.h", "libhmoe.so", "libhmoe.so.0", "libhmoe.a", "hmoe.pc", "hmoe",
                              "libhmoe_aclnn.so", "hmoe-config.cmake", "hmoe-config-version.cmake", "hmoe_targets.cmake"}, names)
        self.assertEqual({path.name for path in (self.place / "include").iterdir()},
                         {"hmoe.h", "aclnn_hyper_mega_moe.h"})

    def test_pkg_config_aclnn(self):
        program = self.build("aclnn", *self.flags("--cflags", "--libs", package="hmoe_aclnn"),
                             example=house.SOURCE / "examples/05_aclnn.c")
        self.works(program, self.lib, "the same bits as hmoe_forward")

    def test_pkg_config_shared(self):
        program = self.build("shared", *self.flags("--cflags", "--libs"), "-lm")
        self.works(program, self.lib)
        unloaded = subprocess.run([program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        self.assertNotEqual(unloaded.returncode, 0, "it does not use the installed shared library")

    def test_pkg_config_static(self):
        flags = ["-l:libhmoe.a" if flag == "-lhmoe" else flag for flag in self.flags("--cflags", "--libs", "--static")]
        self.works(self.build("static", *flags))

    def test_cmake_package(self):
        project = self.place / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(PROJECT.format(example=f'"{self.example}"'))
        house.run("cmake", "-G", "Ninja", "-S", project, "-B", project / "build",
                  f"-DCMAKE_PREFIX_PATH={self.place}", f"-DCMAKE_C_COMPILER={self.compiler}")
        house.run("cmake", "--build", project / "build")
        self.works(project / "build/with_shared")
        self.works(project / "build/with_static")

    def header_alone(self, *options):
        program = self.place / "header.c"
        program.write_text("#include <aclnn_hyper_mega_moe.h>\n#include <hmoe.h>\n"
                           "int main(void) { return (int)sizeof(struct hmoe_call) < 0; }\n")
        house.run(self.compiler, *options, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only",
                  f"-I{self.place}/include", program)

    def test_the_header_is_plain_c(self):
        self.header_alone("-std=c99")
        self.header_alone("-std=c11")

    def test_the_header_is_cpp_too(self):
        if "clang" not in self.compiler:
            self.skipTest("gcc without g++ knows no C++; the clang build runs this")
        self.header_alone("-x", "c++", "-std=c++11")

    def test_the_command(self):
        self.assertIn("hmoe", house.run(self.place / "bin/hmoe", "--help"))

    def test_the_version_is_one(self):
        version = house.cached("CMAKE_PROJECT_VERSION")
        self.assertEqual(self.flags("--modversion"), [version])
        self.assertIn(f'#define HMOE_VERSION "{version}"', (self.place / "include/hmoe.h").read_text())


if __name__ == "__main__":
    house.main()
