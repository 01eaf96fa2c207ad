"""Values only: the YAML files that fill the schema of vit_tp.config. A package, so that an installed copy is found."""
