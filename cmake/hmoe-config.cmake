# find_package(hmoe) gives hmoe::hmoe (shared) and hmoe::hmoe_static.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/hmoe_targets.cmake)
