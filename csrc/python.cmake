# The extension kvtier._native: the bindings, linked with the core. With CUDA, also kvtier._native_cuda.

# SKBUILD_SABI_COMPONENT is set for wheels of the stable ABI only: tools/build_wheels.py.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
find_package(nanobind CONFIG REQUIRED)

function(kvtier_install target)
  kvtier_options(${target})
  if(KVTIER_IN_PLACE OR SKBUILD_STATE STREQUAL "editable")
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/../kvtier")
  else()
    install(TARGETS ${target} LIBRARY DESTINATION kvtier)
  endif()
endfunction()

nanobind_add_module(_native STABLE_ABI NB_STATIC NOMINSIZE ${KVTIER_BINDINGS})
target_link_libraries(_native PRIVATE kvtier_core)
kvtier_install(_native)

include(cuda.cmake)
