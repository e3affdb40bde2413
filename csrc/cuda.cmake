# kvtier._native_cuda, built if there is a working CUDA compiler. Building needs no GPU, loading needs no driver.

include(CheckLanguage)
find_program(KVTIER_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(KVTIER_NVCC AND NOT DEFINED ENV{CUDACXX})
  set(ENV{CUDACXX} ${KVTIER_NVCC})  # Used by check_language, which tolerates a broken compiler.
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  # Machine code for Hopper, and PTX for other GPUs from compute capability 7.5 on.
  set(CMAKE_CUDA_ARCHITECTURES 75-virtual 90-real)
endif()
if(KVTIER_NVCC)
  check_language(CUDA)
endif()
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  find_package(CUDAToolkit)
endif()
if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND)
  message(STATUS "CUDA ${CUDAToolkit_VERSION}: building GPU copies")
  set(CMAKE_CUDA_STANDARD 17)  # The newest standard that CMake 3.25 supports for CUDA 13; sufficient for kernel.cu.
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  add_library(kvtier_cuda STATIC
    src/cuda/device_pages.cpp
    src/cuda/kernel.cu
    src/cuda/pinned.cpp
  )
  target_link_libraries(kvtier_cuda PUBLIC kvtier_core CUDA::cudart_static)
  target_compile_options(kvtier_cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic>)
  nanobind_add_module(_native_cuda STABLE_ABI NB_STATIC NOMINSIZE bindings/cuda_module.cpp)
  target_link_libraries(_native_cuda PRIVATE kvtier_cuda)
  kvtier_install(_native_cuda)
else()
  message(STATUS "no CUDA compiler: torch copies from and to GPUs")
endif()
