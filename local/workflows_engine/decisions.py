"""What the engine does where the service's documentation is silent; docs/workflows-engine.md has the whole table.

These decisions are not checked against the live service. A decision that a constant can express is a constant here,
so that a fact which turns up later is a single edit.
"""

from __future__ import annotations

# An int64 result that does not fit raises ValueError: wrapping, or a double, would corrupt ids silently.
INTEGER_OVERFLOW_TAG = "ValueError"

# Strings are ordered by code point. The order of values of different types (and of maps, lists, bytes, null and
# booleans) is a TypeError. Values of different types are not equal, without an error; 1 == 1.0 is true.
STRINGS_ARE_ORDERED = True

# `my_map.a.b: 1` creates the map `my_map.a` if the key is missing. A value that is not a map is a TypeError.
CREATE_INTERMEDIATE_MAPS = True

# A variable that no step on this path has assigned is a KeyError. The compiler refuses names that no step assigns.
UNASSIGNED_VARIABLE_TAG = "KeyError"

# `retry` without `predicate` retries every error, without `max_retries` 5 times. Missing fields of `backoff` take the
# values of `retry.default_backoff`. There is no jitter between retries.
RETRY_WITHOUT_PREDICATE = "retry.always"
RETRY_DEFAULT_MAX = 5

# Only `true` from a retry predicate retries: any other value, also "true" or null, gives up, and keeps the error that
# the predicate was asked about. An error inside the predicate replaces that error and leaves the whole try step: the
# `except` of the same step does not catch it.

# A step or a branch of a switch with `return` or `raise` and with `next` ends there: `next` is never reached.

# Names of steps may hold any characters, dashes too. Variables and subworkflows have letters, digits and `_`.

# A body whose Content-Type says JSON, and which does not parse, is a string.

# Executions that an execution started run to their end when it is cancelled, fails or is deleted.

# Branch ids in an UnhandledBranchError count from 1, as text; so do the ids of iterations.
FIRST_BRANCH_ID = 1

# Tags beside the documented tag. Real payloads show LookupError with KeyError; the engine treats IndexError alike.
EXTRA_TAGS = {"KeyError": ["LookupError"], "IndexError": ["LookupError"], "UnhandledBranchError": ["RuntimeError"]}

# The compiler refuses `return` inside a parallel branch, and every jump out of a `for` or `parallel` body.
# `next: end` in a branch ends the branch; `next: continue` in a parallel iteration ends the iteration.
RETURN_IN_BRANCH_IS_REFUSED = True

# A value nested deeper is a ResourceLimitError; the service's own JSON also has a bound.
MAX_VALUE_DEPTH = 100

# The compiler refuses an expression that is nested deeper.
MAX_EXPRESSION_DEPTH = 200
