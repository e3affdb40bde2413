# The extension kvtier._native: the bindings, linked with the core.

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
find_package(nanobind CONFIG REQUIRED)

nanobind_add_module(_native NB_STATIC NOMINSIZE ${KVTIER_BINDINGS})
target_link_libraries(_native PRIVATE kvtier_core)
kvtier_options(_native)

if(KVTIER_IN_PLACE OR SKBUILD_STATE STREQUAL "editable")
  set_target_properties(_native PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/../kvtier")
else()
  install(TARGETS _native LIBRARY DESTINATION kvtier)
endif()
