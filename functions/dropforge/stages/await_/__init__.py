"""Stage `await`: the two paths that end the wait for an attempt, job events and `inspect`, and the verdict."""
