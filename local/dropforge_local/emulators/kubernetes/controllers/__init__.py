"""Controllers, which make the cluster match its objects: jobs, deployments, scheduler, garbage collection."""
