"""The console: the web page of a deployment. It reads the runs bucket, and writes only specs and requests."""
