"""What keeps the cluster as its objects say: jobs, deployments, the scheduler, garbage collection."""
