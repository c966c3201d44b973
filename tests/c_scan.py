"""Just enough reading of C for the tidy test: text without comments and strings, and where functions lie."""

import re

TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
DEFINITION = re.compile(r"([A-Za-z_]\w*)\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*$")


def blank(match):
    return "\n" * match.group().count("\n")


def keep_quotes(match):
    text = match.group()
    return blank(match) if text[0] == "/" else text[0] * 2 + blank(match)


def code_only(text):
    """The same lines, with comments gone and strings emptied."""
    return TOKEN.sub(keep_quotes, text)


def functions(text):
    """(name, line, lines) of each function defined in the text; lines from its first line to its closing brace."""
    code = DIRECTIVE.sub(blank, code_only(text)).replace('extern ""', "")
    found, depth, start, head = [], 0, 0, None
    for at, char in enumerate(code):
        if char == "{":
            if depth == 0:
                head = DEFINITION.search(code[start:at])
                first = start + len(code[start:at]) - len(code[start:at].lstrip())
            if depth == 0 and head is None and "=" not in code[start:at] and code[start:at].strip() == "":
                start = at + 1  # extern "C" {
                continue
            depth += 1
        elif char == "}":
            depth = max(depth - 1, 0)
            if depth == 0:
                if head:
                    line = code.count("\n", 0, first) + 1
                    found.append((head.group(1), line, code.count("\n", first, at) + 1))
                head, start = None, at + 1
        elif char == ";" and depth == 0:
            start = at + 1
    return found
