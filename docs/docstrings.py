"""From docstrings to the reference: short types in signatures, formulas typeset, names linked.

Docstrings are written for `help()`: formulas in Unicode, names in single backticks. Here formulas
become TeX, and names of the public surface become links, on the other pages too.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import typing
import unicodedata

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util.inspect import stringify_signature

import diffmh

# Types.

ARRAYS = {"Array", "Bool", "Float", "Inexact", "Int", "Num", "Real", "Shaped", "UInt32", "ndarray"}


def _public_names() -> dict[str, str]:
    """The place in the reference of each name that is clear from its spelling alone."""
    names = {name: f"diffmh.{name}" for name in diffmh.__all__}
    for module in (diffmh.extend, diffmh.sad):
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__.startswith("diffmh"):
                names.setdefault(name, f"{module.__name__}.{name}")
    return names


PUBLIC = _public_names()
PLACES = {
    getattr(module, name): f"{module.__name__}.{name}"
    for module in (diffmh.sad, diffmh.extend, diffmh)
    for name in dir(module)
    if inspect.isclass(getattr(module, name))
}


def _named(name: str, scope: dict) -> str:
    """A type's name, as a link if the reference documents it; `scope` is where it is used."""
    if name in ARRAYS:
        return "Array"
    meant = scope.get(name)
    if isinstance(meant, (types.GenericAlias, typing._GenericAlias)):  # a name for a longer type
        return _short(ast.parse(str(meant), mode="eval").body, {})
    if not inspect.isclass(meant) or not meant.__module__.startswith("diffmh"):
        return name
    return f"~{PLACES.get(meant, f'{meant.__module__}.{meant.__qualname__}')}"


def _union(node: ast.expr, scope: dict) -> list[str]:
    if isinstance(node, ast.BinOp):
        return [*_union(node.left, scope), *_union(node.right, scope)]
    return [_short(node, scope)]


def _short(node: ast.expr, scope: dict) -> str:
    """A type without the shapes that jaxtyping checks, which the text below it gives in words."""
    match node:
        case ast.BinOp():
            return " | ".join(dict.fromkeys(_union(node, scope)))
        case ast.Subscript(value=value, slice=inner):
            base = _short(value, scope)
            if base.endswith("Checked"):
                return _short(inner, scope)
            if base in ("Array", "Callable", "Key", "PyTree"):
                return base
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return f"{base}[{', '.join(_short(item, scope) for item in items)}]"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _named(name, scope)
    return ast.unparse(node)


def short_type(annotation, scope: dict):
    """`annotation` as it stands in the source, made short; none for what says nothing."""
    if not isinstance(annotation, str):
        return inspect.Parameter.empty
    short = _short(ast.parse(annotation, mode="eval").body, scope)
    return inspect.Parameter.empty if short in ("Any", "None") else short


def _short_types(app, what, name, obj, options, given, returned):
    if given is None or what not in ("class", "function", "method"):
        return None
    if what == "class" and given == "()":  # `autoclass:: Report()`: nobody but the library calls it
        return "", None
    found, scope = inspect.signature(obj), vars(sys.modules[obj.__module__])
    constants = getattr(obj, "__kwdefaults__", None) or {}
    parameters = []
    for argument, parameter in found.parameters.items():
        if repr(parameter.default).startswith("_"):  # the name of a constant of the module
            parameter = parameter.replace(default=constants[argument])
        if argument != "self":
            annotation = short_type(parameter.annotation, scope)
            parameters.append(parameter.replace(annotation=annotation))
    answer = short_type(found.return_annotation, scope)
    answer = inspect.Signature.empty if what == "class" else answer
    shown = stringify_signature(found.replace(parameters=parameters, return_annotation=answer))
    arguments, arrow, answer = shown.partition(" -> ")
    return arguments, answer if arrow else None


# Formulas.

FUNCTIONS = {"Cov": r"\operatorname{Cov}", "tr": r"\operatorname{tr}"}
FUNCTIONS |= {name: f"\\{name}" for name in ("cos", "cosh", "coth", "det", "exp", "log", "max")}
FUNCTIONS |= {name: f"\\{name}" for name in ("min", "sinh", "tanh")}
MARKS = {"\u0302": r"\hat", "\u0304": r"\bar", "\u0307": r"\dot"}
SIGNS = {"Σ": r"\sum ", "Π": r"\prod ", "½": r"\tfrac12 ", "·": r"\cdot ", "~": r"\sim "}
SIGNS |= {"‖": r"\Vert ", "∫": r"\int ", "ψ": r"\psi "}
SCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀ]+|[₀₁₂₃₄₅₆₇₈₉]+")
WORD = re.compile(r"[A-Za-z]{3,}")
# Primes, subscripts and powers, expectations; names of several words, strings.
ASCII_SIGN = re.compile(r"[A-Za-z]'|\b[A-Za-z]_[A-Za-z0-9]\b|\^|\bCov\(|\bE\[")
OF_PROGRAMS = re.compile(r"[a-z]{2}_[a-z]{2}|'\w+'|\"|\*\*|\w{2}=")
IN_WORDS = {"data", "law", "likelihood", "mean", "observed", "odds", "outcome", "prior"}


def is_formula(text: str) -> bool:
    """True if code in a docstring is mathematics: it has its signs, and no names of the program."""
    words = set(WORD.findall(text)) - FUNCTIONS.keys() - IN_WORDS
    signs = not text.isascii() or ASCII_SIGN.search(text)
    return bool(signs) and not words and not OF_PROGRAMS.search(text)


def _script(found: re.Match) -> str:
    plain = unicodedata.normalize("NFKC", found[0]).replace("−", "-")
    return f"{'_' if '₀' <= found[0][0] <= '₉' else '^'}{{{plain}}}"


def _roots(text: str) -> str:
    """`√(a + b)` and `√a` in TeX."""
    while (start := text.find("√")) >= 0:
        rest = text[start + 1 :]
        depth, end = 0, 0
        while not end or depth:
            depth += {"(": 1, ")": -1}.get(rest[end], 0)
            end += 1
        inner = rest[1 : end - 1] if rest.startswith("(") else rest[:end]
        text = f"{text[:start]}\\sqrt{{{inner}}}{rest[end:]}"
    return text


def tex(text: str) -> str:
    """A formula of a docstring in TeX; MathJax reads Greek letters and most signs as they are."""
    text = SCRIPT.sub(_script, text.replace("≠", r"\neq "))
    text = unicodedata.normalize("NFD", text)
    text = re.sub(
        f"(\\w)([{''.join(MARKS)}])", lambda found: f"{MARKS[found[2]]}{{{found[1]}}}", text
    )
    text = re.sub(r"_([^\W_]+)", r"_{\1}", text)
    text = re.sub(r"\^\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"\bd/d(\w) ", r"\\frac{d}{d\1} ", text)
    text = text.replace(" | ", r" \mid ")
    text = re.sub(r"\s{3,}", r" \\qquad ", text)
    text = "".join(SIGNS.get(letter, letter) for letter in _roots(text))

    def word(found: re.Match) -> str:
        return FUNCTIONS.get(found[0], rf"\operatorname{{{found[0]}}}") + " "

    return re.sub(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|of|tr(?= ))", word, text)


def _formulas(app, what, name, member, options, lines):
    """An indented line in a docstring is a formula."""
    depth, before, shown, inside = 0, "", [], False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        begins = line.strip() and not (shown and shown[-1].strip()) and indent >= depth + 4
        if begins and not before.lstrip().startswith(("-", "*", ">>>")):
            shown += [" " * depth + ".. math::", ""]
            inside = True
        elif line.strip() and indent <= depth:
            inside = False
        if line.strip() and not inside:
            depth, before = indent, line
        shown.append(line[:indent] + tex(line[indent:]) if inside else line)
    lines[:] = shown


# Names.

NAME = re.compile(r"(?:diffmh\.)?(?P<path>[A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\))?", re.DOTALL)
MODULES = ("extend.", "models.", "plots.", "sad.")


def target_of(text: str) -> str | None:
    """The name that code on a page stands for, if it is one of the library's beyond doubt."""
    found = NAME.fullmatch(text)
    if found is None:
        return None
    path = found["path"]
    first, _, rest = path.partition(".")
    if text.startswith("diffmh.") or path.startswith(MODULES):
        return PUBLIC.get(path, f"diffmh.{path}")
    known = first in PUBLIC and (first[0].isupper() or "_" in first)
    return PUBLIC[first] + (f".{rest}" if rest else "") if known else None


class LinksAndFormulas(SphinxTransform):
    """Code in running text: names are linked; in docstrings, formulas are typeset."""

    default_priority = 400
    outside = (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.download_reference)

    def apply(self, **kwargs):
        for code in list(self.document.findall(nodes.literal)):
            above, node = [], code.parent
            while node is not None:
                above.append(node)
                node = node.parent
            text = code.astext()
            if any(isinstance(node, self.outside) for node in above):
                continue
            in_docstring = any(isinstance(node, addnodes.desc_content) for node in above)
            if in_docstring and is_formula(text):
                code.parent.replace(code, nodes.math(text, tex(" ".join(text.split()))))
            elif (target := target_of(text)) is not None:
                self._link(code, target, above)

    def _link(self, code, target, above):
        described = [node for node in above if isinstance(node, addnodes.desc)]
        signatures = [sign for node in described for sign in node.findall(addnodes.desc_signature)]
        if any(target in sign.get("ids", ()) for sign in signatures):
            return  # the name that is being explained
        link = addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=False
        )
        link["refdoc"] = self.env.docname
        code.parent.replace(code, link)
        link += code


def setup(app):
    app.connect("autodoc-process-signature", _short_types)
    app.connect("autodoc-process-docstring", _formulas)
    app.add_transform(LinksAndFormulas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
