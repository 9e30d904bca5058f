"""What every emulated API is built from: routes over REST and gRPC, pages, filters."""
