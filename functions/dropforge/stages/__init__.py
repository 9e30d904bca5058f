"""One module for each word of the flow: submit, admission, cancel, provision, await, deploy, teardown, sweep.

A stage may import every other package. Inside the package, imports point one way: sweep to submit, submit to admission
and cancel, and all of them to answers and retries.
"""
