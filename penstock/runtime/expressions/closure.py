"""Compiles expressions to Python functions over lists of records: the data stream's half (docs/papers.md: D1).

A function is written as source text, one list comprehension for the whole batch, and compiled once a process. What the
text can say quickly is written in line: fields are subscripts, a comparison with a literal is an operator, a filter
tests for "true" and so needs no third value. Everything else is a call of `kernels`.

    compile_filter((col("kind") == "view") & (col("price") > 5))
    [r for r in records if r["kind"] == "view" and (t0 := r["price"]) is not None and (t0 > 5 or t0 != t0)]

Given a schema, the functions trust it: a field of type bigint is taken for an int. Without one a value's own type
decides, at some cost for arithmetic and for comparing two fields; what could not be compared is then an error of the
record, except that == and isin with a string, a boolean or an integer find a value of another type different. An
integer that `when` or `coalesce` may give in place of a double is brought to one only where the types are known.

A function must never keep or change a record, and reads no field that the expression does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from penstock.runtime.errors import FlowError, PenstockError, shorten
from penstock.runtime.expressions import jsontext, kernels, pattern, tree
from penstock.runtime.expressions.tree import BIGINT_MAX, BIGINT_MIN, Alias, Call, Column, Expr
from penstock.runtime.expressions.typed import (
    ARITHMETIC,
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    NULL,
    STRING,
    TIMESTAMP,
    Schema,
    Type,
    call_type,
    decimal_size,
    infer,
    kind,
    literal_type,
)

Shape = Literal["filter", "select", "with_columns", "value"]

_GENERATED = __file__.removesuffix(".py") + ".generated"  # in tracebacks, so that nobody takes it for the user's code
_EXACT_AS_DOUBLE = 2**53  # integers up to here are doubles, so comparing exactly and as doubles is the same
_DEPTH = 12  # nested operations in one Python expression; its parser gives up at 200 brackets
_OPERATORS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
_INLINE = {"add": "+", "sub": "-", "mul": "*"}
_CASTS = {
    "int": "to_int",
    BIGINT: "to_bigint",
    DOUBLE: "to_double",
    STRING: "to_string",
    BOOLEAN: "to_boolean",
    TIMESTAMP: "to_timestamp",
    DATE: "to_date",
}
# Operations on operands that are not null, as Python; {0} and {1} stand for the operands, {p} for the parameters.
_CODE = {
    "str.upper": "{0}.upper()",
    "str.lower": "{0}.lower()",
    "str.length": "len({0})",
    "str.strip": "{0}.strip({p[0]})",
    "str.lstrip": "{0}.lstrip({p[0]})",
    "str.rstrip": "{0}.rstrip({p[0]})",
    "str.contains": "({1} in {0})",
    "str.startswith": "{0}.startswith({1})",
    "str.endswith": "{0}.endswith({1})",
    "str.replace": "{0}.replace({p[0]}, {p[1]})",
    "str.split": "{0}.split({p[0]})",
    "list.len": "len({0})",
    "dt.year": "calendar({0}).year",
    "dt.month": "calendar({0}).month",
    "dt.day": "calendar({0}).day",
    "dt.hour": "utc({0}).hour",
    "dt.minute": "utc({0}).minute",
    "dt.second": "utc({0}).second",
}
_MAY_BE_NULL = frozenset({"div", "idiv", "mod", "cast", "json", "list.get", "dt.from_epoch_ms"})  # of what is not null
_NEVER_NULL = frozenset({"is_null", "is_not_null"})


class MissingField(PenstockError, LookupError):
    """A record has no field with a name that an expression reads."""


class EvaluationError(PenstockError):
    """An expression cannot be evaluated for a record. The message has the expression and the reason."""


class Closure:
    """Holds expressions that are ready to run over records. The function is compiled at its first use, in the process
    that runs it, and again in every process that it is sent to."""

    def __init__(self, shape: Shape, exprs: Mapping[str, Expr], schema: Schema | None = None) -> None:
        self.shape = shape
        self.exprs = dict(exprs)
        self.schema = None if schema is None else dict(schema)
        for expr in self.exprs.values():
            found = infer(expr, schema)
            if shape == "filter" and found not in (None, BOOLEAN, NULL):
                raise FlowError(f"filter({expr!r}): the expression is a {found}; a filter needs a condition")
        self._functions: dict[str, Any] | None = None
        self._single: dict[str, Closure] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Closure, (self.shape, self.exprs, self.schema)

    def __repr__(self) -> str:
        exprs = ", ".join(f"{name}={expr!r}" if name else repr(expr) for name, expr in self.exprs.items())
        return f"<{self.shape} {shorten(exprs)[1:-1]}>"

    def __call__(self, records: list[Any]) -> list[Any]:
        """Returns the results for a list of records. An error is about the first record that fails. Nothing is kept of
        the other records, but as expressions only compute, the caller can start again with `iterate` or `evaluate`."""
        functions = self._functions or self._build()
        try:
            return functions["batch"](records)  # type: ignore[no-any-return]
        except Exception:
            for record in records:
                self.evaluate(record)  # raises for the one that failed, and says why
            raise

    def iterate(self, records: Iterable[Any]) -> Iterator[Any]:
        """Yields the results one by one, for `userfunc.apply`. At an error the iterator stands after the failing
        record."""
        functions = self._functions or self._build()
        return functions["iterate"](records)  # type: ignore[no-any-return]

    def evaluate(self, record: Any) -> Any:
        """Returns the result for one record: what a list of this record alone gives, and for a filter whether the
        record is kept."""
        functions = self._functions or self._build()
        try:
            return functions["evaluate"](record)
        except Exception as error:  # a record may be of a class of the user's, which raises what it likes
            raise self._explained(record, error) from error

    @property
    def source(self) -> str:
        """Returns the Python text that it runs, for the curious."""
        functions = self._functions or self._build()
        return str(functions["source"])

    def _build(self) -> dict[str, Any]:
        writer = _Writer(self.schema)
        source = writer.program(self.shape, self.exprs)
        functions = writer.names
        functions["explained"] = self._explained
        exec(compile(source, _GENERATED, "exec"), functions)
        functions["source"] = source
        self._functions = functions
        return functions

    def _explained(self, record: Any, error: Exception) -> Exception:
        if not isinstance(record, Mapping):
            return EvaluationError(
                f"expressions take records that are dicts, not {type(record).__name__}: {shorten(record, 80)}"
            )
        if isinstance(error, KeyError) and error.args and error.args[0] not in record:
            name = error.args[0]
            return MissingField(
                f"the record has no field {name!r}; it has: {shorten(', '.join(map(str, record)), 400)[1:-1] or 'none'}"
                f". Write {Column(name, True)!r} if it may be absent"
            )
        for name, expr in self.exprs.items():
            if len(self.exprs) == 1:
                return EvaluationError(f"{shorten(expr)}: {error}")
            single = self._single.setdefault(name, Closure("value", {"": expr}, self.schema))
            try:
                single.evaluate(record)
            except PenstockError as found:
                return EvaluationError(f"{name} = {found}")
        return error


def compile_filter(expr: Expr, schema: Schema | None = None) -> Closure:
    """Compiles a function that returns the records for which the expression is true (not false, not null)."""
    return Closure("filter", {"": tree.lit(expr)}, schema)


def compile_select(exprs: Mapping[str, Expr] | Sequence[Expr | str], schema: Schema | None = None) -> Closure:
    """Compiles a function that returns records with these fields and no others."""
    return Closure("select", tree.named(exprs), schema)


def compile_with_columns(exprs: Mapping[str, Expr] | Sequence[Expr | str], schema: Schema | None = None) -> Closure:
    """Compiles a function that returns copies of the records with these fields added or replaced. All fields are
    computed from the record as it was."""
    return Closure("with_columns", tree.named(exprs), schema)


def compile_value(expr: Expr, schema: Schema | None = None) -> Closure:
    """Compiles a function that returns the expression's values."""
    return Closure("value", {"": tree.lit(expr)}, schema)


class _Writer:
    """Writes the source text of one closure."""

    def __init__(self, schema: Schema | None) -> None:
        self.schema = schema
        self.names: dict[str, Any] = {
            name: getattr(kernels, name) for name in vars(kernels) if not name.startswith("_") and name.islower()
        }
        self.names["REALS"] = kernels.REALS
        self._types: dict[int, tuple[Expr, Type]] = {}
        self._temps = 0
        self._depth = 0
        self._helpers: list[str] = []
        self._texts: dict[tuple[Any, ...], list[str]] = {}  # JSON text -> the fields taken from it
        self._decoded: dict[tuple[Any, ...], str] = {}  # JSON text -> the variable that has it decoded
        self._constants: dict[tuple[Any, ...], str] = {}

    def program(self, shape: Shape, exprs: Mapping[str, Expr]) -> str:
        lowered = {name: _lower(expr) for name, expr in exprs.items()}
        decoding = self._decoding(lowered.values())
        if shape == "filter":
            (condition,) = (self.truth(expr, True) for expr in lowered.values())
            result = "r"
        else:
            condition = ""
            fields = [(name, self.value(expr)) for name, expr in lowered.items()]
            if shape == "value":
                result = fields[0][1]
            else:
                pairs = [f"{name!r}: {code}" for name, code in fields]
                result = "{" + ", ".join(["**r", *pairs] if shape == "with_columns" else pairs) + "}"
        # A condition that always holds is where a comprehension can set a variable.
        tests = [f"({name} := {code}) is not None" for name, code in decoding] + ([condition] if condition else [])
        batch = f"[{result} for r in records{''.join(f' if {test}' for test in tests)}]"
        one = "".join(f"    {name} = {code}\n" for name, code in decoding)
        each = "".join(f"            {name} = {code}\n" for name, code in decoding)
        kept = (
            f"            if {condition}:\n                yield r\n" if condition else f"            yield {result}\n"
        )
        return (
            "".join(self._helpers)
            + f"def batch(records):\n    return {batch}\n"
            + f"def evaluate(r):\n{one}    return {f'bool({condition})' if condition else result}\n"
            + f"def iterate(records):\n    r = None\n    try:\n        for r in records:\n{each}{kept}"
            + "    except Exception as error:\n        raise explained(r, error) from error\n"
        )

    def _decoding(self, exprs: Iterable[Expr]) -> list[tuple[str, str]]:
        """Returns (variable, code) for each JSON text of which more than one field is taken. Inner texts come first."""
        uses: dict[tuple[Any, ...], tuple[Expr, int]] = {}
        for expr in exprs:
            for node in reversed(list(expr.walk())):  # what it is made of comes before an expression
                if isinstance(node, Call) and node.op == "json":
                    text, name = tree.key(node.args[0]), node.params[0][0]
                    _, n = uses.get(text, (node.args[0], 0))
                    uses[text] = (node.args[0], n + 1)
                    names = self._texts.setdefault(text, [])
                    if name not in names:
                        names.append(name)
        found = []
        for text, (expr, n) in uses.items():
            if n > 1:
                code = self._decode(text, expr)
                self._decoded[text] = f"j{len(self._decoded)}"
                found.append((self._decoded[text], code))
        return found

    def _decode(self, text: tuple[Any, ...], expr: Expr) -> str:
        decode = self._constant(("decode", text), lambda: jsontext.decoder(self._texts[text]))
        return f"{decode}({self.value(expr)})"

    # --- what is known before running -------------------------------------------------------------------------

    def type(self, expr: Expr) -> Type:
        found = self._types.get(id(expr))
        if found is None:
            if isinstance(expr, Call):
                name = call_type(expr, [self.type(arg) for arg in expr.args])
            else:
                name = infer(expr, self.schema)
            found = self._types[id(expr)] = (expr, name)  # the expression is kept, so that its id stays its own
        return found[1]

    def kind(self, expr: Expr) -> Type:
        return kind(self.type(expr))

    def nullable(self, expr: Expr) -> bool:
        if isinstance(expr, tree.Literal):
            return expr.value is None
        if not isinstance(expr, Call):
            return True
        return expr.op not in _NEVER_NULL and (expr.op in _MAY_BE_NULL or any(map(self.nullable, expr.args)))

    # --- names --------------------------------------------------------------------------------------------------

    def _temp(self) -> str:
        self._temps += 1
        return f"t{self._temps - 1}"

    def _constant(self, key: tuple[Any, ...], make: Callable[[], Any]) -> str:
        if key not in self._constants:
            name = self._constants[key] = f"c{len(self._constants)}"
            self.names[name] = make()
        return self._constants[key]

    def _literal(self, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return repr(value)
        if isinstance(value, int) and value >= 0:
            return repr(value)
        if isinstance(value, str) and len(value) <= 80:
            return ascii(value)
        return self._constant((type(value).__name__, repr(value)), lambda: value)

    def _kernel(self, name: str, *codes: str) -> str:
        return f"{name}({', '.join(codes)})"

    # --- values -------------------------------------------------------------------------------------------------

    def value(self, expr: Expr) -> str:
        """Returns the Python code of an expression's value. The code can stand in any place."""
        if isinstance(expr, tree.Literal):
            return self._literal(expr.value)
        if isinstance(expr, Column):
            return f"r.get({expr.field!r})" if expr.optional else f"r[{expr.field!r}]"
        assert isinstance(expr, Call)
        return self._nested(lambda: self._call(expr))

    def _nested(self, write: Callable[[], str]) -> str:
        """Returns the code that `write` writes, in a function of its own when it would be nested too deeply."""
        self._depth += 1
        try:
            if self._depth % _DEPTH:
                return write()
            outer, self._depth = self._depth, 0
            code = write()
            self._depth = outer
            variables = ", ".join(self._variables())
            name = f"part{len(self._helpers)}"
            self._helpers.append(f"def {name}({variables}):\n    return {code}\n")
            return f"{name}({variables})"
        finally:
            self._depth -= 1

    def _unless_null(self, args: Sequence[Expr], write: Callable[[list[str]], str]) -> str:
        """Returns the result of `write` for the arguments' values, or None where one of them is null."""
        operands, tests = self._operands(args)
        code = write(operands)
        return f"(None if {' or '.join(f'{test} is None' for test in tests)} else {code})" if tests else f"({code})"

    def _operands(self, args: Sequence[Expr]) -> tuple[list[str], list[str]]:
        """Returns names or literals for the arguments' values, and the code that sets these names, to be tested for
        None."""
        operands, tests = [], []
        for arg in args:
            code = self.value(arg)
            if not isinstance(arg, tree.Literal) or arg.value is None:
                name = self._temp()
                tests.append(f"({name} := {code})")
                code = name
            operands.append(code)
        return operands, tests

    def _call(self, expr: Call) -> str:
        op, args = expr.op, expr.args
        if op in _OPERATORS:
            return self._comparison(op, args[0], args[1], None)
        if op in ARITHMETIC:
            return self._arithmetic(expr)
        if op in ("and", "or"):
            return self._junction(expr)
        if op == "not":
            return self._unless_null(args[:1], lambda t: f"not {self._checked(args[0], t[0])}")
        if op in ("is_null", "is_not_null"):
            return self._null(args[0], op == "is_null")
        if op == "isin":
            return self._isin(expr, None)
        if op == "cast":
            return self._cast(expr)
        if op == "when":
            return self._when(expr)
        if op == "coalesce":
            return self._coalesce(expr)
        if op == "json":
            return self._json(expr)
        if op in _CODE:
            params = [self._literal(param) for param in expr.params]
            return self._unless_null(args, lambda t: _CODE[op].format(*t, p=params))
        if op == "str.substr":
            start, length = expr.params
            return self._unless_null(args, lambda t: f"{t[0]}[{start - 1}:{start - 1 + length}]")
        if op == "regexp_matches":
            search = self._constant(("re", expr.params[0]), lambda: pattern.searcher(expr.params[0]))
            return self._unless_null(args, lambda t: f"{search}({t[0]}) is not None")
        if op == "list.get":
            return self._kernel("element", self.value(args[0]), str(expr.params[0]))
        if op == "dt.truncate":
            return self._kernel("truncate", self.value(args[0]), repr(expr.params[0]))
        # neg, concat, epoch_ms, from_epoch_ms
        return self._kernel(op.removeprefix("dt."), *map(self.value, args))

    def _null(self, expr: Expr, want: bool) -> str:
        if isinstance(expr, tree.Literal):  # Python warns of literals beside `is`
            return str((expr.value is None) is want)
        return f"({self.value(expr)} is {'' if want else 'not '}None)"

    def _checked(self, expr: Expr, code: str) -> str:
        """Returns the code of a boolean, which is checked at run time if its type is not known."""
        return code if self.type(expr) in (BOOLEAN, NULL) else f"boolean({code})"

    def _junction(self, expr: Call) -> str:
        """Returns the code of a & b or a | b with three values: one `decisive` operand decides; otherwise a null makes
        the result null."""
        decisive = expr.op == "or"
        left, right = (self._checked(arg, self.value(arg)) for arg in expr.args)
        a, b = self._temp(), self._temp()
        return (
            f"({decisive} if ({a} := {left}) is {decisive} or ({b} := {right}) is {decisive} "
            f"else None if {a} is None or {b} is None else {not decisive})"
        )

    def _arithmetic(self, expr: Call) -> str:
        op, args = expr.op, expr.args
        kinds = [self.kind(arg) for arg in args]
        if op in _INLINE:
            sign = _INLINE[op]
            if DOUBLE in kinds and set(kinds) <= {DOUBLE, BIGINT}:
                return self._unless_null(args, lambda t: f"{t[0]} {sign} {t[1]}")
            if set(kinds) == {BIGINT}:
                return self._unless_null(args, lambda t: self._wrapped(f"{t[0]} {sign} {t[1]}"))
            whole = [isinstance(arg, tree.Literal) and kinds[i] == BIGINT for i, arg in enumerate(args)]
            if kinds.count(None) == 1 and any(whole):
                other = args[whole.index(False)]
                t = self._temp()
                a, b = (self.value(arg) if whole[i] else t for i, arg in enumerate(args))
                return (
                    f"({self._wrapped(f'{a} {sign} {b}')} if ({t} := {self.value(other)}).__class__ is int "
                    f"else {op}({a}, {b}))"
                )
            if None in kinds and set(kinds) <= {None, DOUBLE}:
                # Beside a double an integer becomes one, as in Spark; two fields may be integers that wrap.
                test = "in REALS" if DOUBLE in kinds else "is float"
                operands, tests = self._operands(args)
                a, b = operands
                # Not `and`: the kernel takes both operands.
                return f"({a} {sign} {b} if {' & '.join(f'({t}.__class__ {test})' for t in tests)} else {op}({a}, {b}))"
        if op == "div" and DOUBLE in kinds and set(kinds) <= {DOUBLE, BIGINT}:
            return self._unless_null(args, lambda t: f"({t[0]} / {t[1]} if {t[1]} else None)")
        return self._kernel(op, *map(self.value, args))

    def _wrapped(self, code: str) -> str:
        t = self._temp()
        return f"({t} if {BIGINT_MIN} <= ({t} := {code}) <= {BIGINT_MAX} else wrap({t}))"

    def _cast(self, expr: Call) -> str:
        target, source = expr.params[0], self.type(expr.args[0])
        code = self.value(expr.args[0])
        size = decimal_size(target)
        if size is not None:
            return f"{self._constant(('decimal', size), lambda: kernels.to_decimal(*size))}({code})"
        if source is not None and source in (target, NULL):
            return code
        places = decimal_size(source)
        if target == STRING and places is not None:
            return f"{self._constant(('places', places), lambda: kernels.decimal_to_string(places[1]))}({code})"
        return self._kernel(_CASTS[target], code)

    def _when(self, expr: Call) -> str:
        whole = self.type(expr)
        code = self._as(whole, expr.args[-1])
        pairs = list(zip(expr.args[:-1:2], expr.args[1::2], strict=False))
        if len(pairs) > _DEPTH:  # each further condition is a bracket more
            return self._kernel(self._when_function(pairs, code, whole), *self._variables())
        for condition, value in reversed(pairs):
            code = f"({self._as(whole, value)} if {self.truth(condition, True)} else {code})"
        return code

    def _variables(self) -> list[str]:
        return ["r", *self._decoded.values()]

    def _when_function(self, pairs: list[tuple[Expr, Expr]], last: str, whole: Type) -> str:
        lines = [
            f"    if {self.truth(condition, True)}:\n        return {self._as(whole, value)}\n"
            for condition, value in pairs
        ]
        name = f"part{len(self._helpers)}"
        self._helpers.append(f"def {name}({', '.join(self._variables())}):\n{''.join(lines)}    return {last}\n")
        return name

    def _coalesce(self, expr: Call) -> str:
        whole = self.type(expr)
        *firsts, last = (self._as(whole, arg) for arg in expr.args)
        t = self._temp()
        return "(" + "".join(f"{t} if ({t} := {first}) is not None else " for first in firsts) + f"{last})"

    def _as(self, whole: Type, expr: Expr) -> str:
        """Returns the code of a value of `when` or `coalesce`, as a double if the other values make it one."""
        code = self.value(expr)
        return self._kernel("to_double", code) if whole == DOUBLE and self.kind(expr) in (BIGINT, "decimal") else code

    def _json(self, expr: Call) -> str:
        text = tree.key(expr.args[0])
        decoded = self._decoded.get(text) or self._decode(text, expr.args[0])
        first, *rest = expr.params[0]
        code = f"{decoded}.f{self._texts[text].index(first)}"
        if rest:
            self.names["walk"] = jsontext.walk
            return f"walk({code}, {tuple(rest)!r})"
        self.names["text_of"] = jsontext.text_of
        t = self._temp()
        return f"({t} if ({t} := {code}).__class__ is str or {t} is None else text_of({t}))"

    # --- conditions ---------------------------------------------------------------------------------------------

    def truth(self, expr: Expr, want: bool) -> str:
        """Returns code that is true where an expression is `want`, and false where it is the opposite or null."""
        if isinstance(expr, Call):
            return self._nested(lambda: self._truth(expr, want))
        return self._is(expr, want)

    def _truth(self, expr: Call, want: bool) -> str:
        op, args = expr.op, expr.args
        if op in ("and", "or"):
            both = [self.truth(part, want) for part in _flat(expr, op)]
            joint = " and " if (op == "and") is want else " or "
            return f"({joint.join(both)})"
        if op == "not":
            return self.truth(args[0], not want)
        if op in _OPERATORS:
            return self._comparison(op if want else _OPPOSITE[op], args[0], args[1], True)
        if op in ("is_null", "is_not_null"):
            return self._null(args[0], (op == "is_null") is want)
        if op == "isin":
            return self._isin(expr, want)
        return self._is(expr, want)

    def _is(self, expr: Expr, want: bool) -> str:
        code = self._checked(expr, self.value(expr))
        return f"({code} is {want})"

    def _comparison(self, op: str, left: Expr, right: Expr, truth: bool | None) -> str:
        """Returns the code of a == b and so on. With `truth` only being true counts, so that null may be false."""
        if isinstance(left, tree.Literal) and not isinstance(right, tree.Literal):
            return self._comparison(_MIRRORED[op], right, left, truth)
        how = self._how(op, left, right)
        if how is None:
            code = self._kernel(op, self.value(left), self.value(right))
            return f"({code} is True)" if truth else code
        if truth and op == "eq" and how == "{0} == {1}" and isinstance(right, tree.Literal):
            return f"({self.value(left)} == {self.value(right)})"  # None equals no literal
        operands, tests = self._operands((left, right))
        code = how.format(*operands)
        if not truth:
            return f"(None if {' or '.join(f'{test} is None' for test in tests)} else {code})" if tests else f"({code})"
        return f"({''.join(f'{test} is not None and ' for test in tests)}{code})"

    def _how(self, op: str, left: Expr, right: Expr) -> str | None:
        """Returns the Python code of a comparison of {0} and {1}, neither of them null, or None if only a kernel can
        compare them."""
        sign, a, b = _OPERATORS[op], self.kind(left), self.kind(right)
        plain = f"{{0}} {sign} {{1}}"
        with_nan = f"({plain} or {{0}} != {{0}})" if op in ("gt", "ge") else plain
        if isinstance(right, tree.Literal) and right.value is not None:
            value = right.value
            if b in (STRING, BOOLEAN):
                return plain if a in (None, b) else None
            if b == TIMESTAMP:
                return f"utc({{0}}) {sign} {{1}}"
            if b == BIGINT and abs(value) <= _EXACT_AS_DOUBLE:
                return plain if a in (BIGINT, "decimal") else with_nan if a in (None, DOUBLE) else None
            if b == DOUBLE and abs(value) < _EXACT_AS_DOUBLE:  # at 2**53 itself, 2**53 + 1 as a double is equal
                if a in (BIGINT, DOUBLE):
                    return with_nan
                return f"({with_nan} if {{0}}.__class__ is float else {op}({{0}}, {{1}}))" if a is None else None
        if a == b and a in (BIGINT, STRING, BOOLEAN, DATE, "decimal"):
            return plain
        if a == b == TIMESTAMP:
            return f"utc({{0}}) {sign} utc({{1}})"
        return None

    def _isin(self, expr: Call, want: bool | None) -> str:
        """Returns the code of a membership test. `want` is as for `truth`; None asks for the value."""
        values = [param.value for param in expr.params if param.value is not None]
        has_null = len(values) < len(expr.params)
        if not expr.params:
            return str(want is False)
        subject = expr.args[0]
        quick = {literal_type(value) for value in values} in ({STRING}, {BOOLEAN}, {BIGINT}, {TIMESTAMP}) and all(
            not isinstance(value, int) or abs(value) <= _EXACT_AS_DOUBLE for value in values
        )
        if not quick:
            literals = tuple(param.value for param in expr.params)
            several = self._constant(("values", tree.key(expr)), lambda: literals)
            code = self._kernel("isin", self.value(subject), several)
            return code if want is None else f"({code} is {want})"
        members = self._constant(("set", tree.key(expr)), lambda: frozenset(values))
        instants = isinstance(values[0], datetime)
        if want is False and has_null:
            return "False"
        if want and not instants:
            return f"({self.value(subject)} in {members})"
        t = self._temp()
        inside = f"{f'utc({t})' if instants else t} {'not in' if want is False else 'in'} {members}"
        if want is not None:
            return f"(({t} := {self.value(subject)}) is not None and {inside})"
        return f"(None if ({t} := {self.value(subject)}) is None else {inside}{' or None' if has_null else ''})"


def _flat(expr: Expr, op: str) -> Iterator[Expr]:
    """Returns the operands of a chain of one operation, such as a & b & c, in their order."""
    stack = [expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Call) and node.op == op:
            stack.extend(reversed(node.args))
        else:
            yield node


def _lower(expr: Expr) -> Expr:
    """Returns the expression without aliases, and without operations that others can express."""
    if isinstance(expr, Alias):
        return _lower(expr.expr)
    if not isinstance(expr, Call):
        return expr
    args = tuple(map(_lower, expr.args))
    if expr.op == "between":
        value, low, high = args
        return Call("and", (Call("ge", (value, low)), Call("le", (value, high))))
    return Call(expr.op, args, expr.params)
