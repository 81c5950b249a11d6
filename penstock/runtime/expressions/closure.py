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
from typing import Any, Literal

from penstock.runtime.errors import FlowError, PenstockError, shorten
from penstock.runtime.expressions import jsontext, kernels, tree
from penstock.runtime.expressions.operations import OPERATIONS, infer
from penstock.runtime.expressions.tree import BIGINT_MAX, BIGINT_MIN, Alias, Call, Column, Expr
from penstock.runtime.expressions.typed import BOOLEAN, NULL, Schema, Type, kind

Shape = Literal["filter", "select", "with_columns", "value"]

_GENERATED = __file__.removesuffix(".py") + ".generated"  # in tracebacks, so that nobody takes it for the user's code
_DEPTH = 12  # nested operations in one Python expression; its parser gives up at 200 brackets


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
        writer = Writer(self.schema)
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


class Writer:
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
        decode = self.constant(("decode", text), lambda: jsontext.decoder(self._texts[text]))
        return f"{decode}({self.value(expr)})"

    # --- what is known before running -------------------------------------------------------------------------

    def type(self, expr: Expr) -> Type:
        found = self._types.get(id(expr))
        if found is None:
            if isinstance(expr, Call):
                name = OPERATIONS[expr.op].type(expr, [self.type(arg) for arg in expr.args])
            else:
                name = infer(expr, self.schema)
            found = self._types[id(expr)] = (expr, name)  # the expression is kept, so that its id stays its own
        return found[1]

    def kind(self, expr: Expr) -> Type:
        return kind(self.type(expr))

    # --- names --------------------------------------------------------------------------------------------------

    def temp(self) -> str:
        self._temps += 1
        return f"t{self._temps - 1}"

    def constant(self, key: tuple[Any, ...], make: Callable[[], Any]) -> str:
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
        return self.constant((type(value).__name__, repr(value)), lambda: value)

    def kernel(self, function: Callable[..., Any], *codes: str) -> str:
        """Returns the code that calls a function of `kernels`."""
        return f"{function.__name__}({', '.join(codes)})"

    def function(self, body: str) -> str:
        """Defines a function of the record with a body of its own, and returns the code that calls it."""
        call = f"part{len(self._helpers)}({', '.join(['r', *self._decoded.values()])})"
        self._helpers.append(f"def {call}:\n{body}")
        return call

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
            return self.function(f"    return {code}\n")
        finally:
            self._depth -= 1

    def unless_null(self, args: Sequence[Expr], write: Callable[[list[str]], str]) -> str:
        """Returns the result of `write` for the arguments' values, or None where one of them is null."""
        operands, tests = self.operands(args)
        code = write(operands)
        return f"(None if {' or '.join(f'{test} is None' for test in tests)} else {code})" if tests else f"({code})"

    def operands(self, args: Sequence[Expr]) -> tuple[list[str], list[str]]:
        """Returns names or literals for the arguments' values, and the code that sets these names, to be tested for
        None."""
        operands, tests = [], []
        for arg in args:
            code = self.value(arg)
            if not isinstance(arg, tree.Literal) or arg.value is None:
                name = self.temp()
                tests.append(f"({name} := {code})")
                code = name
            operands.append(code)
        return operands, tests

    def _call(self, expr: Call) -> str:
        code = OPERATIONS[expr.op].code
        if not isinstance(code, str):
            return code(self, expr)
        params = [self._literal(param) for param in expr.params]
        return self.unless_null(expr.args, lambda t: code.format(*t, p=params))

    def checked(self, expr: Expr, code: str) -> str:
        """Returns the code of a boolean, which is checked at run time if its type is not known."""
        return code if self.type(expr) in (BOOLEAN, NULL) else f"boolean({code})"

    def wrapped(self, code: str) -> str:
        t = self.temp()
        return f"({t} if {BIGINT_MIN} <= ({t} := {code}) <= {BIGINT_MAX} else wrap({t}))"

    def json(self, expr: Call) -> str:
        text = tree.key(expr.args[0])
        decoded = self._decoded.get(text) or self._decode(text, expr.args[0])
        first, *rest = expr.params[0]
        code = f"{decoded}.f{self._texts[text].index(first)}"
        if rest:
            self.names["walk"] = jsontext.walk
            return f"walk({code}, {tuple(rest)!r})"
        self.names["text_of"] = jsontext.text_of
        t = self.temp()
        return f"({t} if ({t} := {code}).__class__ is str or {t} is None else text_of({t}))"

    # --- conditions ---------------------------------------------------------------------------------------------

    def truth(self, expr: Expr, want: bool) -> str:
        """Returns code that is true where an expression is `want`, and false where it is the opposite or null."""
        if isinstance(expr, Call):
            return self._nested(lambda: self._truth(expr, want))
        return self._is(expr, want)

    def _truth(self, expr: Call, want: bool) -> str:
        truth = OPERATIONS[expr.op].truth
        return self._is(expr, want) if truth is None else truth(self, expr, want)

    def _is(self, expr: Expr, want: bool) -> str:
        code = self.checked(expr, self.value(expr))
        return f"({code} is {want})"


def _lower(expr: Expr) -> Expr:
    """Returns the expression without aliases."""
    if isinstance(expr, Alias):
        return _lower(expr.expr)
    return Call(expr.op, tuple(map(_lower, expr.args)), expr.params) if isinstance(expr, Call) else expr
