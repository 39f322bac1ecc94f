# ruff: noqa: E501 (a table of programs, a row each)
"""Right answers of every shape that tests have are paid 1: the counterpart of `test_red_team`."""

import pytest

from eval.rewards.jail.sandbox import PLANS, Limits, Plan, Program, Protection, probe, run_program

WORKING = [plan for plan in PLANS if isinstance(probe(plan), Protection)]
if not WORKING:
    pytest.skip(f"no plan works here: {[probe(plan) for plan in PLANS]}", allow_module_level=True)

LIMITS = Limits(cpu_s=2, wall_s=60)

NODE = "class Node:\n  def __init__(s, v):\n    s.v = v\n    s.next = None\n"
STDLIB = "import collections, datetime, decimal, fractions\n"
VALUES = """[None, True, -2**80, 10**5000, 1.5, float('inf'), 2j, 'a\\ud800', b'b', bytearray(b'c'), (1, [2]), {3}, frozenset([4]),
    {(5,): {6: 7}}, range(8), {9: 1}.keys(), ..., int, collections.Counter('aab'), collections.OrderedDict(a=1),
    collections.defaultdict(int, a=1), collections.deque([1], 3), decimal.Decimal('1.50'), fractions.Fraction(1, 3),
    datetime.date(2020, 2, 29), datetime.datetime(2020, 1, 1, 2, 3), datetime.time(4, 5), datetime.timedelta(6, 7, 8)]"""
RIGHT = {
    "plain data of every kind": (f"{STDLIB}def f(): return {VALUES}", (STDLIB, f"r = f()\nassert r == {VALUES}",
                                 f"assert [type(v) for v in r] == [type(v) for v in {VALUES}]")),
    "arguments of every kind": ("def f(x): return repr(x)", (STDLIB, f"v = {VALUES}; del v[3]", "assert f(v) == repr(v)")),
    "NaN": ("def f(): return float('nan')", ("x = f(); assert x != x",)),
    "in place": ("def f(x): x.sort()", ("l = [3, 1]; f(l); assert l == [1, 3]",)),
    "in place, deep": ("def f(x):\n  x['a'][0].add(4)\n  x['b'] = x['a']",
                       ("d = {'a': [{1}]}; s = d['a'][0]; f(d); assert d == {'a': [{1, 4}], 'b': [{1, 4}]}", "assert s == {1, 4}")),
    "in place before it raises": ("def f(x):\n  x.append(1)\n  raise ValueError", ("l = []\ntry: f(l)\nexcept ValueError: pass\n"
                                                                               "assert l == [1]",)),
    "returns its argument": ("def f(x):\n  x.append(1)\n  return x", ("l = []; assert f(l) is l",)),
    "the same list twice": ("def f(a, b):\n  a.append(1)\n  return a is b", ("l = []; assert f(l, l) and l == [1]",)),
    "exception": ("def f(x):\n  if x < 0: raise ValueError('neg')", ("try: f(-1)\nexcept ValueError as e: assert str(e) == 'neg'\n"
                                                                 "else: assert False",)),
    "KeyError": ("def f(d): return d['k']", ("try: f({})\nexcept KeyError as e: assert e.args == ('k',)\nelse: assert False",)),
    "exceptions of its own": ("class A(ValueError): pass\nclass B(A): pass\ndef f(x): raise B('b')",
                              ("for kind in (A, B, ValueError):\n  try: f(1)\n  except kind as e: assert str(e) == 'b'\n"
                               "  else: assert False",)),
    "generator": ("def f(n):\n  for i in range(n): yield i", ("assert list(f(3)) == [0, 1, 2]", "g = f(2); assert next(g) == 0")),
    "endless generator": ("import itertools\ndef f(): return itertools.count(5)",
                          ("import itertools", "assert list(itertools.islice(f(), 3)) == [5, 6, 7]")),
    "map and zip": ("def f(x): return zip(x, map(str, x))", ("assert list(f([1, 2])) == [(1, '1'), (2, '2')]",)),
    "lambdas": ("def f(g, x): return [g(v) for v in x if g(v)]", ("assert f(lambda v: v - 1, [1, 2]) == [1]", "assert f(abs, [-1]) == [1]",
                                                              "assert f(int, ['3']) == [3]")),
    "lambda that calls back": ("def f(g, n): return g(n) if n else 0", ("assert f(lambda n: n + f(lambda m: m * 10, n - 1), 3) == 23",)),
    "returns a function": ("def f(n): return lambda x: x + n", ("assert f(2)(3) == 5",)),
    "classes of the answer": (NODE + "def f(n):\n  total = 0\n  while n: total += n.v; n = n.next\n  return total",
                              ("root = Node(1)\nroot.next = Node(2)\nroot.next.next = Node(3)", "assert f(root) == 6",
                               "assert root.next.v == 2 and root.next is root.next", "assert f(Node(4)) == 4")),
    "methods": ("class Stack:\n  def __init__(s): s.l = []\n  def push(s, x): s.l.append(x)\n  def pop(s): return s.l.pop()\n"
                "  def __len__(s): return len(s.l)\n  def __getitem__(s, k): return s.l[k]\n  def __str__(s): return 'S'",
                ("s = Stack(); s.push(1); s.push([2])", "assert len(s) == 2 and s[1] == [2] and str(s) == 'S'",
                 "assert s.pop() == [2] and s.l == [1]")),
    "classes of the tests": ("def f(n):\n  n.next.v += 1\n  return n.next.v + n.get()",
                             (NODE + "  def get(s): return s.v * 10\n", "n = Node(1); n.next = Node(5)", "assert f(n) == 16 and n.next.v == 6")),
    "named tuple": ("import collections\nP = collections.namedtuple('P', 'x y')\ndef f(): return P(1, 2)", ("assert f() == (1, 2)",)),
    "enum": ("import enum\nclass E(enum.IntEnum): A = 3\ndef f(): return E.A", ("assert f() == 3",)),
    "Decimal": ("from decimal import Decimal\ndef f(): return Decimal('0.1') * 3", ("from decimal import Decimal", "assert f() == Decimal('0.3')")),
    "constant": ("LIMIT = {'a': (1, 2)}\ndef f(x): return x", ("assert f(LIMIT['a']) == (1, 2)",)),
    "module that it imported": ("import sys\ndef f(x): return sys.getsizeof(x)", ("assert f((1, 2)) == sys.getsizeof((1, 2))",)),
    "keywords": ("def f(a, *b, c=1, **d): return a, b, c, d", ("assert f(1, 2, c=3, e=4) == (1, (2,), 3, {'e': 4})",)),
    "named as a builtin": ("def sum(a, b): return a + b", ("assert sum(1, 2) == 3",)),
    "file that it wrote": ("def f(): open('t', 'w').write('x')", ("f(); assert open('t').read() == 'x'",)),
    "a hundred calls": ("def f(x): return x + 1", ("for i in range(100): assert f(i) == i + 1",)),
    "large": ("def f(n): return list(range(n))", ("assert f(200_000) == list(range(200_000))",)),
}  # fmt: skip


@pytest.fixture(params=WORKING)
def plan(request: pytest.FixtureRequest) -> Plan:
    return request.param


@pytest.mark.parametrize("name", RIGHT)
def test_right_answer_is_paid(name: str, plan: Plan) -> None:
    answer, tests = RIGHT[name]
    outcome = run_program(Program(answer, tests), LIMITS, plan)
    assert outcome.status == "passed", outcome
