# The shared and the static library, both from the objects of the rooms, both showing hmoe_* only.
add_library(hmoe SHARED $<TARGET_OBJECTS:hmoe_objects>)
target_link_libraries(hmoe PRIVATE Threads::Threads m)
target_include_directories(hmoe PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
set_target_properties(hmoe PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})

# The ACLNN interface is a library of its own: nobody else is to meet CANN's names.
file(GLOB HMOE_ACLNN_SOURCES CONFIGURE_DEPENDS src/aclnn/*.c)
add_library(hmoe_aclnn_objects OBJECT ${HMOE_ACLNN_SOURCES})
target_include_directories(hmoe_aclnn_objects PUBLIC include src)
add_library(hmoe_aclnn SHARED $<TARGET_OBJECTS:hmoe_aclnn_objects>)
target_link_libraries(hmoe_aclnn PUBLIC hmoe PRIVATE Threads::Threads)
set_target_properties(hmoe_aclnn PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})

# An archive of many objects shows every name that one object takes from another. One object, linked from all of them,
# can have its hidden names made local. A sanitizer's own tables do not survive that, so there the objects stay apart.
if(HMOE_SANITIZE)
  add_library(hmoe_static STATIC $<TARGET_OBJECTS:hmoe_objects>)
else()
  set(one_object ${PROJECT_BINARY_DIR}/hmoe_all.o)
  add_custom_command(OUTPUT ${one_object}
    COMMAND ${CMAKE_C_COMPILER} -r -nostdlib -o ${one_object} $<TARGET_OBJECTS:hmoe_objects>
    COMMAND ${CMAKE_OBJCOPY} --localize-hidden ${one_object}
    DEPENDS hmoe_objects $<TARGET_OBJECTS:hmoe_objects>
    COMMENT "Linking all objects into one and hiding what is not public"
    COMMAND_EXPAND_LISTS VERBATIM)
  set_source_files_properties(${one_object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  add_library(hmoe_static STATIC ${one_object})
  set_target_properties(hmoe_static PROPERTIES LINKER_LANGUAGE C)
endif()
target_link_libraries(hmoe_static INTERFACE Threads::Threads m)
target_include_directories(hmoe_static INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
set_target_properties(hmoe_static PROPERTIES OUTPUT_NAME hmoe)
