"""From a traced function to a rewritten one: jaxprs are cut into FP8 regions, and a region lowers through the passes."""
