"""What the service does where its documentation is silent: one named choice each (docs/workflows-engine.md lists them).

Nothing here was checked against the live service. A constant is here, and not in the code that reads it, so that a
fact that turns up later is one edit.
"""

from __future__ import annotations

# `-7 // 2` is -4 and `-7 % 2` is 1: the documentation says "floor division", so the remainder takes the divisor's sign.
FLOOR_DIVISION = True

# int64 results that do not fit raise ValueError; wrapping or turning into a double would corrupt ids silently.
INTEGER_OVERFLOW_TAG = "ValueError"

# Strings are ordered by code point. Ordering different kinds (or maps, lists, bytes, null, booleans) is a TypeError.
# Equality across kinds is false, never an error; 1 == 1.0 is true.
STRINGS_ARE_ORDERED = True

# `range: [5, 1]` runs no iteration.
EMPTY_RANGE_IS_ALLOWED = True

# `my_map.a.b: 1` creates the map `my_map.a` when the key is missing; a present value that is no map is a TypeError.
CREATE_INTERMEDIATE_MAPS = True

# Reading a variable that no step on this path has assigned yet is a KeyError (it is known at deploy time).
UNASSIGNED_VARIABLE_TAG = "KeyError"

# A `for` body's variables are made anew when the loop is entered, not at each iteration; a parallel iteration's are.
LOOP_SCOPE_IS_PER_LOOP = True

# Waits between retries are exact: no jitter is documented.
RETRY_JITTER = 0.0

# `retry` without `predicate` retries every error; without `max_retries` 5 times; missing backoff fields take the
# values of `retry.default_backoff`.
RETRY_WITHOUT_PREDICATE = "retry.always"
RETRY_DEFAULT_MAX = 5

# Branch ids in an UnhandledBranchError count from 1, as text; iterations too.
FIRST_BRANCH_ID = 1

# Beyond the documented tag: real payloads show LookupError with KeyError; IndexError is taken to be alike.
EXTRA_TAGS = {"KeyError": ["LookupError"], "IndexError": ["LookupError"], "UnhandledBranchError": ["RuntimeError"]}

# A double that is a whole number keeps its point in string() and JSON ("5.0"); others are the shortest exact decimal.
WHOLE_DOUBLES_KEEP_THEIR_POINT = True

# In a callback, `query` is a map from name to text; a name given more than once becomes a list.
CALLBACK_QUERY_IS_MAP = True

# `math.floor` is accepted (documentation pages disagree on whether it exists); lint warns.
MATH_FLOOR_EXISTS = True

# `return` inside a parallel branch, and any jump out of a `for` or `parallel` body, are refused at deploy time.
# `next: end` in a branch ends the branch; `next: continue` in a parallel iteration ends the iteration.
RETURN_IN_BRANCH_IS_REFUSED = True

# A body nested deeper than this is refused as a ResourceLimitError (the service's own JSON has such a bound).
MAX_VALUE_DEPTH = 100

# An expression nested deeper than this is refused at deploy time.
MAX_EXPRESSION_DEPTH = 200
