"""A virtual cluster on virtual time under the production controller, and the explorer that breaks it."""
