"""What users write and processes say to each other: jobs, clusters, units, messages."""
