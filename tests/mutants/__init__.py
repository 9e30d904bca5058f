"""Mutation testing: change the production code in one place, and see which tests notice. docs/mutants.md says how."""
