"""From a traced function to a rewritten one: jaxprs are cut into FP8 regions, which lower through the passes."""
