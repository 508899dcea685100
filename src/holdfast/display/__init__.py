"""What a person, or a program, sees while a run is going on: rich, plain, json or none."""
